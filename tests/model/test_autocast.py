"""Growths inside an autocast region: checked in the model's own precision, and training continues with the grown weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import shake

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
HALF = torch.bfloat16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    shake(model)
    return model


def convolution() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(12, 2))
    shake(model)
    return model


GROWTHS: dict[str, tuple[Callable[[], nn.Module], Callable[..., outgrow.Growth]]] = {
    "widen": (network, lambda model, **more: outgrow.widen(model, X, "*", factor=2, **more)),
    "deepen": (network, lambda model, **more: outgrow.deepen(model, X, "3", **more)),
    "kernel": (convolution, lambda model, **more: outgrow.kernel(model, X, "1", 5, **more)),
}


def autocast() -> Any:
    return torch.autocast("cpu", HALF)


def in_half(model: nn.Module) -> Tensor:
    with autocast(), torch.no_grad():
        result: Tensor = model(X)
    return result


@pytest.mark.parametrize("name", GROWTHS)
def test_training_continues_within_the_region(name: str) -> None:
    """Reference: the same loop, with one region that ends before the growth and another that begins after it."""
    results = []
    for split in (False, True):
        make, grow = GROWTHS[name]
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        region = autocast()
        region.__enter__()
        model(X).square().mean().backward()  # fills the cache with casts of the old weights
        if split:
            region.__exit__(None, None, None)
        growth = grow(model, optimizer=optimizer)
        assert growth.max_error < 1e-5  # bfloat16 would allow a tenth
        if split:
            region.__enter__()
        loss = model(X).square().mean()
        loss.backward()
        region.__exit__(None, None, None)
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        results.append([loss.detach(), *(parameter.detach() for parameter in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", GROWTHS)
def test_outputs_are_preserved(name: str) -> None:
    make, grow = GROWTHS[name]
    model = make()
    before, exact = in_half(model), model(X)
    with autocast():
        grow(model)
        after = model(X)
    torch.testing.assert_close(model(X), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.float(), before.float(), rtol=0.05, atol=0.05)


def test_analysing_a_model_within_the_region_does_not_change_its_gradients() -> None:
    class Reading(nn.Module):
        """Reads a value, so that it is traced on real tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x).relu()
            return self.two(y) if y.sum().item() >= 0 else -self.two(y)

    model = Reading()
    with autocast():
        outgrow.volumes(model, X)
        outgrow.places(model, X)
        model(X).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_needs_autocast_is_grown_under_it() -> None:
    class Halving(nn.Module):
        """An input of half precision for weights of single precision."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.two(self.one(x.to(HALF)).relu())
            return result

    model = Halving()
    shake(model)
    before = in_half(model)
    with autocast():
        outgrow.widen(model, X, "one", by=4)
        model(X).float().square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(in_half(model).float(), before.float(), rtol=0.05, atol=0.05)
