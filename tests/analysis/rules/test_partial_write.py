"""Tensors that are written part by part: slices of canvases, packed and padded sequences, Fourier modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.trace.view_regions import box_of
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons

Cut = Callable[[Tensor], Tensor]
CUTS: list[tuple[tuple[int, ...], Cut]] = [
    ((4, 6), lambda t: t[:, 2:5]),
    ((4, 6), lambda t: t[1:4:2]),
    ((4, 6), lambda t: t[:, 1::2].t()),
    ((4, 6), lambda t: t[2]),
    ((4, 6), lambda t: t[:, 3]),
    ((4, 1, 6), lambda t: t[:, 0, ::3]),
    ((2, 3, 4, 5), lambda t: t[1, :, 1:3, ::2].permute(2, 0, 1)),
    ((2, 3, 4, 5), lambda t: t[..., 4].unsqueeze(1)),
    ((3, 4), lambda t: t.t()[1:3]),
]


@pytest.mark.parametrize(("shape", "cut"), CUTS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_box_shows_the_same_places_as_its_view(shape: tuple[int, ...], cut: Cut, turned: bool) -> None:
    base = torch.arange(torch.Size(shape).numel()).view(shape)
    base = base.transpose(0, -1).contiguous().transpose(0, -1) if turned else base
    view = cut(base)
    box = box_of(view, base)
    assert box is not None
    picked = base[tuple(slice(s.start, s.start + s.step * (s.count - 1) + 1, s.step) for s in box)]
    assert sorted(picked.flatten().tolist()) == sorted(view.flatten().tolist())
    order = [axis for axis, side in enumerate(box) if side.axis is not None]
    there = [box[axis].axis for axis in order]
    sizes = [view.shape[axis] for axis in there]
    laid = picked.reshape([picked.shape[axis] for axis in order])
    assert sizes == list(laid.shape)
    squeezed = view.permute([*there, *(axis for axis in range(view.ndim) if axis not in there)]).reshape(sizes)
    assert torch.equal(laid, squeezed)


def test_what_is_no_slice_has_no_box() -> None:
    base = torch.arange(12).view(3, 4)
    assert box_of(base.diagonal(), base) is None
    assert box_of(base.view(-1)[1:], base) is None
    assert box_of(base.view(2, 6), base) is None
    assert box_of(base, base[:1].expand(3, 4)) is None


class Canvas(nn.Module):
    """Two layers whose results are written into one tensor, in several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(8 if how in SIDE_BY_SIDE else 4, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(WRITTEN[self.how](self.one(x), self.two(x))))


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    canvas = a.new_zeros(*a.shape[:-1], a.shape[-1] + b.shape[-1])
    canvas[..., : a.shape[-1]] = a
    canvas[..., a.shape[-1] :] = b
    return canvas


def beside_nothing(a: Tensor, b: Tensor) -> Tensor:
    canvas = torch.zeros(*a.shape[:-1], a.shape[-1] + 4, dtype=a.dtype)
    canvas[..., 4:] = a + b
    return canvas


def on(canvas: Tensor, a: Tensor, b: Tensor) -> Tensor:
    canvas[:, 0] = a[:, 1]
    canvas[:, 2:4] = b[:, :2]
    return canvas


def twice(a: Tensor, b: Tensor) -> Tensor:
    canvas = torch.zeros_like(a)
    canvas[:, :3] = a[:, :3]
    canvas = canvas + b
    canvas[:, 1:] = b[:, 1:]
    return canvas


def turned(a: Tensor, b: Tensor) -> Tensor:
    canvas = torch.zeros(a.shape[2], *a.shape[:2], dtype=a.dtype)
    canvas.permute(1, 2, 0)[:, :2] = a[:, :2]
    return canvas.permute(1, 2, 0) + b


WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "side by side": side_by_side,
    "beside nothing": beside_nothing,
    "on zeros": lambda a, b: on(torch.zeros_like(a), a, b),
    "on ones": lambda a, b: on(torch.ones(a.shape, dtype=a.dtype), a, b),
    "on another": lambda a, b: on(a * b, a, b),
    "twice": twice,
    "turned": turned,
}
SIDE_BY_SIDE = ("side by side", "beside nothing")


@pytest.mark.parametrize("how", WRITTEN)
def test_what_is_written_in_pieces_grows_exactly(how: str) -> None:
    model = randomised(Canvas(how))
    x, fresh = (torch.randn(batch, 4, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(batch)) for batch in (2, 3))
    assert_exact_everywhere(model, x, fresh, {"one", "two"} if how == "side by side" else {"one"})


def test_zero_writers_on_a_canvas_of_ones_are_not_taken_for_zeros() -> None:
    assert "netmorph" in growable(randomised(Canvas("on zeros")), torch.randn(2, 4, 3, dtype=DTYPE))["one"]
    model = randomised(Canvas("on ones"))
    outgrow.widen(model, torch.randn(2, 4, 3, dtype=DTYPE), "one", by=2, method=outgrow.NetMorph(zero="writers"))
    assert not model.out.weight[:, 4:].any()


def test_a_fixed_input_that_is_written_beside_units_pins_them() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.out = nn.Linear(3, 4), nn.Linear(7, 2)

        def forward(self, x: Tensor) -> Tensor:
            canvas = torch.zeros(len(x), 7, dtype=x.dtype)
            canvas[:, :4] = self.one(x)
            canvas[:, 4:] = x
            return self.out(canvas)

    found = reasons(Beside(), torch.randn(2, 3))
    assert "set by the model's input" in found["out#2"]


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths."""

    def __init__(self, kind: type[nn.RNNBase], last: bool, **options: Any) -> None:
        super().__init__()
        self.enter, self.last = nn.Linear(3, 4), last
        self.rnn = kind(4, 6, batch_first=True, **options)
        self.out = nn.Linear(12 if options.get("bidirectional") and not last else 6, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.enter(x), lengths, batch_first=True, enforce_sorted=False)
        y, state = self.rnn(packed)
        if self.last:
            return self.out((state[0] if isinstance(state, tuple) else state)[-1])
        return self.out(nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTM, {}), (nn.GRU, {}), (nn.RNN, {}), (nn.LSTM, {"bidirectional": True, "num_layers": 2})],
)
def test_packed_sequences_grow_exactly(kind: type[nn.RNNBase], options: dict[str, Any], last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    example = torch.randn(3, 6, 3, dtype=DTYPE, generator=generator), torch.tensor([6, 2, 4])
    fresh = torch.randn(4, 5, 3, dtype=DTYPE, generator=generator), torch.tensor([1, 5, 2, 2])
    assert_exact_everywhere(randomised(Packed(kind, last, **options)), example, fresh, {"enter", "rnn"}, modes=(False,))
