"""Cached operators on meta tensors give what torch gives without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outgrow
from outgrow.model.meta_copy import CachedShapes


class Counted(TorchDispatchMode):
    """Counts the operators that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def meta(*size: int) -> Tensor:
    return torch.empty(*size, device="meta")


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda x: x.sigmoid_(),
    "add": lambda x: x.add_(meta(1, 4)),
    "copy": lambda x: x.copy_(meta(4)),
    "masked": lambda x: x.masked_fill_(torch.empty(3, 4, dtype=torch.bool, device="meta"), 0.0),
    "view": lambda x: x[1:].mul_(2.0),
    "transpose": lambda x: x.t_(),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "resize": lambda x: x.resize_(2, 2),
    "set": lambda x: x.set_(meta(2, 5)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_in_place_give_the_geometry_and_version_of_torch(write: Callable[[Tensor], Tensor]) -> None:
    expected = meta(3, 4)
    right = write(expected)
    with CachedShapes():
        for _ in range(3):
            x = meta(3, 4)
            result = write(x)
            assert (result is x) == (right is expected)
            for found, want in ((x, expected), (result, right)):
                assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype)
                assert found._version == want._version


def test_memory_that_is_replaced_is_replaced_every_time() -> None:
    with CachedShapes():
        for _ in range(2):
            x, other = meta(2, 2), meta(2, 2)
            x.set_(other)
            assert x.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("wrong", [lambda x: x.add_(meta(5)), lambda x: x.copy_(meta(2, 4))])
def test_a_write_that_torch_refuses_is_refused_again(wrong: Callable[[Tensor], Tensor]) -> None:
    with CachedShapes():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                wrong(meta(3, 4))


def test_repeated_writes_do_not_reach_torch() -> None:
    with Counted() as counted, CachedShapes():
        for _ in range(5):
            meta(3, 4).sigmoid_()
    assert counted.count == 2  # one tensor, one write


def test_a_long_recurrence_still_grows_exactly() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.lstm(x)[0].mean(1))
            return result

    torch.manual_seed(0)
    model, x = Last().double(), torch.randn(2, 30, 3, dtype=torch.float64)
    before = model(x).detach()
    outgrow.widen(model, x, "lstm*", factor=2)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_cached_results_are_not_operators_of_an_outer_mode() -> None:
    """A trace within a survey on the meta device has two caches: one is enough for each operator."""
    x = meta(3, 4)
    with Counted() as outer, CachedShapes():
        first = torch.relu(x) @ x.t()
        count = outer.count
        second = torch.relu(x) @ x.t()
    assert outer.count == count + 1  # the view alone
    assert (second.shape, second.stride(), second.dtype, second.device) == (
        first.shape,
        first.stride(),
        first.dtype,
        first.device,
    )
