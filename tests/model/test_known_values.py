"""Values that code reads on the meta device are those that it reads in a pass with values, or reading them is an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.model.known_values import LARGEST, KnownShapes, ValuesUnavailable, on_meta
from outgrow.model.meta_copy import CachedShapes, tensors_on_meta
from outgrow.trace.record import record

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 0]])
MASK = torch.tensor([[True, True, False, True, True], [True, False, False, True, True]])
X = torch.randn(2, 5, 4)
Reads = Callable[[Tensor, Tensor, Tensor], Any]


def written_through_a_view(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    row = own[1]
    row[2:] = 7
    own.view(-1)[0] += 100
    return own.tolist(), int(own.sum())


def written_as_mask(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = torch.zeros_like(ids)
    own.masked_fill_(mask, 3).scatter_(1, ids[:, :2].clamp(max=4), 50)
    return own.tolist()


def repeated_write(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    count = torch.zeros(3, dtype=torch.long, device=x.device)
    for _ in range(4):  # equal calls, whose shapes are cached
        count += 1
        count[1:].mul_(2)
    return count.tolist()


def turned_in_place(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    own.t_().unsqueeze_(0)
    return own.shape, own.tolist()


READ: dict[str, Reads] = {
    "item": lambda ids, mask, x: ids[1, 0].item(),
    "branch": lambda ids, mask, x: "all" if mask.all() else "some",
    "index": lambda ids, mask, x: list(range(ids.max())),
    "list": lambda ids, mask, x: ids.tolist(),
    "numpy": lambda ids, mask, x: ids.cpu().numpy().sum().item(),
    "lengths": lambda ids, mask, x: mask.sum(-1).cumsum(0).tolist(),
    "factories": lambda ids, mask, x: (
        torch.arange(2, 9, 2, device=x.device).max().item() + x.new_ones(3, dtype=torch.int).sum()
    ),
    "like": lambda ids, mask, x: torch.full_like(x[..., 0], 7, dtype=torch.long).sum().item(),
    "grid": lambda ids, mask, x: (
        torch.stack(torch.meshgrid(torch.arange(3, device=x.device), torch.arange(4, device=x.device), indexing="ij"), -1)
        .flip(-1)[..., 0]
        .max()
        .item()
    ),
    "nonzero": lambda ids, mask, x: mask.nonzero().tolist(),
    "selected": lambda ids, mask, x: ids[mask].tolist(),
    "unique": lambda ids, mask, x: [part.tolist() for part in torch.unique(ids, return_counts=True)],
    "equal": lambda ids, mask, x: (torch.equal(ids, ids.clone()), torch.equal(ids, ids + 1)),
    "sorted": lambda ids, mask, x: [part.tolist() for part in ids.sort(dim=-1, stable=True)],
    "one hot": lambda ids, mask, x: torch.nn.functional.one_hot(ids, 12).sum((0, 1)).tolist(),
    "repeated": lambda ids, mask, x: ids.repeat_interleave(mask.sum(-1), dim=0).tolist(),
    "large view": lambda ids, mask, x: ids[0, 0].expand(LARGEST + 1)[-1].item(),
    "from the CPU": lambda ids, mask, x: (torch.tensor([3, 4]).to(x.device) + ids[0, :2]).tolist(),
    "mask of floats": lambda ids, mask, x: (
        torch.ones(2, 5, device=x.device).all().item(),
        ((1.0 - mask.to(x.dtype)) * -1e9 < 0).tolist(),
    ),
    "constant": lambda ids, mask, x: (torch.tensor([[2, 3]], device=x.device).expand(2, 2) * ids[:, :2]).tolist(),
    "constant of values": lambda ids, mask, x: torch.tensor([ids[0].max(), ids[1].max()], device=x.device).tolist(),
    "shape of what a mask selects": lambda ids, mask, x: (x[mask].shape, x[:, mask[0]].shape),
    "floats in place": lambda ids, mask, x: (torch.zeros_like(mask, dtype=x.dtype).masked_fill_(mask, 2.0) > 1).tolist(),
    "view": written_through_a_view,
    "mask": written_as_mask,
    "repeated write": repeated_write,
    "turned": turned_in_place,
}


def on_the_meta_device(reads: Reads) -> Any:
    with CachedShapes(known=True):
        result = reads(*on_meta((IDS, MASK, X)))
        return result.item() if isinstance(result, Tensor) else result


@pytest.mark.parametrize("name", READ)
def test_values_are_those_of_a_pass_with_values(name: str) -> None:
    before = IDS.clone()
    expected = READ[name](IDS, MASK, X)
    assert on_the_meta_device(READ[name]) == expected
    assert torch.equal(IDS, before)


def unknown_into_known(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = torch.zeros(5, dtype=torch.long, device=x.device)
    first = own[:1]
    own[1:].copy_(x[0, 1:, 0].long())
    return first.item()


def unknown_mask(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    view = own.view(-1)
    own.masked_fill_(x[..., 0] > 0, 0)
    return view.max().item()


def written_as_floats(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    own.view(torch.float64).fill_(1.0)
    return own.max().item()


def noise(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    own.random_(10)
    return own.max().item()


def write_out(ids: Tensor, mask: Tensor, x: Tensor) -> Any:
    own = ids.clone()
    torch.argmax(x, dim=-1, out=own)
    return own.max().item()


UNKNOWN: dict[str, Reads] = {
    "float": lambda ids, mask, x: x.sum().item(),
    "branch on floats": lambda ids, mask, x: 1 if (x > 0).any() else 0,
    "argmax": lambda ids, mask, x: x.argmax(-1).tolist(),
    "too large": lambda ids, mask, x: (ids[0, 0].expand(LARGEST + 1) + 1).max().item(),
    "random": lambda ids, mask, x: torch.randint(5, (3,), device=x.device).max().item(),
    "chosen by floats": lambda ids, mask, x: ids[x[..., 0] > 0].tolist(),
    "unknown into known": unknown_into_known,
    "unknown mask": unknown_mask,
    "written as floats": written_as_floats,
    "noise": noise,
    "rounded sums": lambda ids, mask, x: torch.full((3,), 0.1, device=x.device).sum().item(),
    "exponential": lambda ids, mask, x: torch.ones(3, device=x.device).exp().max().item(),
    "floats of unknown": lambda ids, mask, x: torch.zeros_like(x).add_(x).max().item(),
    "sums by index": lambda ids, mask, x: (
        torch.zeros(12, device=x.device)
        .index_put_((ids[0],), torch.full((5,), 0.1, device=x.device), accumulate=True)
        .max()
        .item()
    ),
    "out": write_out,
    "example": lambda ids, mask, x: ids.add_(1).max().item(),
    "view of the example": lambda ids, mask, x: ids[0].fill_(1).max().item(),
    "other memory": lambda ids, mask, x: ids.clone().resize_(20).sum().item(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_are_not_known_are_not_read(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_the_meta_device(UNKNOWN[name])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        taken = x.masked_fill(padded[..., None], 0.0) if padded.any() else x
        return x + self.down(torch.relu(self.up(taken)))


class Tokens(nn.Module):
    """Reads the number of words and the mask. by_depth: divides by the number of its layers, counted in a tensor."""

    count = 0  # passes with values

    def __init__(self, by_depth: bool = False, by_value: bool = False) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(10, 4), nn.ModuleList(Block() for _ in range(3)), nn.Linear(4, 2)
        self.by_depth, self.by_value = by_depth, by_value

    def forward(self, ids: Tensor) -> Tensor:
        counter = torch.zeros(1, dtype=torch.long, device=ids.device)
        lengths = (ids > 0).sum(-1)
        x = self.words(ids[:, : int(lengths.max())])
        Tokens.count += not x.is_meta
        padded = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, padded)
            if self.by_depth:
                counter += 1
        if self.by_depth:
            x = x / counter.item()
        if self.by_value and x.max() > 1e6:
            x = x * 2
        return self.head(x)


@pytest.fixture
def tokens() -> Tensor:
    return torch.tensor([[3, 1, 4, 0, 0], [9, 2, 6, 5, 0]])


@pytest.mark.parametrize("within", [False, True])
def test_the_trace_is_that_of_a_pass_with_values(tokens: Tensor, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tokens(by_depth=True).eval()
    with tensors_on_meta(model, known=True) if within else nullcontext():
        trace = record(model, on_meta(tokens) if within else tokens)
    assert (trace.meta, trace.known) == (True, True)
    monkeypatch.setattr("outgrow.trace.record.KnownShapes", None)
    with_values = record(model, tokens)
    assert not with_values.meta
    seen = [[(op.name, op.args, op.kwargs, op.outputs, op.module) for op in one.ops] for one in (trace, with_values)]
    assert [[str(part).replace("'meta'", "'cpu'") for part in op] for op in seen[0]] == [[*map(str, op)] for op in seen[1]]
    assert [value.shape for value in trace.values] == [value.shape for value in with_values.values]


def test_places_of_a_model_that_reads_integers_need_no_pass_with_values(tokens: Tensor) -> None:
    model = Tokens().eval()
    Tokens.count = 0
    found = outgrow.places(model, tokens)
    assert Tokens.count == 0
    assert [place.methods for place in found if place.name.startswith("layers.") and place.name.count(".") == 1] == [
        ("r2r", "r2r-paper")
    ] * 3
    reads_floats = Tokens(by_value=True).eval()
    reads_floats.load_state_dict(model.state_dict())
    assert outgrow.places(reads_floats, tokens) == found
    assert Tokens.count > 0


def test_a_model_that_reads_its_depth_is_not_deepened(tokens: Tensor) -> None:
    found = {place.name: place for place in outgrow.places(Tokens(by_depth=True).eval(), tokens)}
    assert "with one more block there the outputs change" in found["layers.1"].reason


def test_a_model_on_the_meta_device_may_read_integers(tokens: Tensor) -> None:
    model = Tokens().eval()
    with torch.device("meta"):
        without = Tokens().eval()
    assert [(v.name, v.count, v.methods) for v in outgrow.volumes(without, tokens)] == [
        (v.name, v.count, v.methods) for v in outgrow.volumes(model, tokens)
    ]
    assert outgrow.places(without, tokens) == outgrow.places(model, tokens)


def test_widening_is_exact(tokens: Tensor) -> None:
    model = Tokens().double().eval()
    before = model(tokens)
    Tokens.count = 0
    outgrow.widen(model, tokens, "*", factor=2, check=False)
    assert Tokens.count == 0
    assert model.layers[2].up.weight.shape[0] == 16
    torch.testing.assert_close(model(tokens), before, rtol=1e-12, atol=1e-12)


def test_the_example_is_never_written() -> None:
    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            ids.add_(1)
            return self.head(self.words(ids[:, : int(ids.min())]))

    ids = torch.tensor([[3, 2, 5]])
    given = on_meta(ids)
    with pytest.raises(ValuesUnavailable), CachedShapes(known=True):
        Shifts()(given)
    assert ids.tolist() == [[3, 2, 5]]


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_graph_networks_are_read_as_in_a_pass_with_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They remove loops from the edges of the example, which makes the number of edges depend on values."""
    networks = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    model = getattr(networks, name)(in_channels=4, hidden_channels=6, num_layers=3, out_channels=2).eval()
    example = torch.randn(5, 4), torch.tensor([[0, 1, 2, 3, 3, 4], [1, 2, 2, 0, 4, 1]])

    def results() -> Any:
        found = [(v.name, v.count, v.methods, v.pinned, v.reason, v.slots) for v in outgrow.volumes(model, example)]
        return found, outgrow.places(model, example)

    def disabled(*_: Any) -> None:
        raise ValuesUnavailable("disabled")

    assert record(model, example).known
    known = results()
    monkeypatch.setattr(KnownShapes, "call", disabled)
    assert not record(model, example).meta
    assert results() == known
