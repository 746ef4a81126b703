"""Compiled models grow under the names of the module inside, and are compiled again afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import outgrow
from outgrow.history.growths_on_model import history

X = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Counting:
    """A backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


class Network(nn.Module):
    """Not an nn.Sequential, on which `Module.compile` has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def network() -> Network:
    torch.manual_seed(0)
    return Network().double()


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def a_part(model: nn.Module, backend: Any) -> nn.Module:
    return nn.Sequential(torch.compile(model, backend=backend), nn.Linear(3, 2).double())


def outside(model: nn.Module, backend: Any) -> nn.Module:
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize(("compiling", "grown"), [(outside, "compiled"), (in_place, "bare")])
def test_a_compiled_model_grows_more_often_than_dynamo_compiles_again(compiling: Any, grown: str) -> None:
    model, backend = network(), Counting()
    compiled = compiling(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(10):
        optimizer.zero_grad()
        compiled(X).square().mean().backward()
        optimizer.step()
        before, graphs = compiled(X).detach(), backend.graphs
        growth = outgrow.widen(compiled if grown == "compiled" else model, X, "layers.0", by=2, optimizer=optimizer)
        assert backend.graphs == graphs  # the growth itself compiles nothing
        assert growth.model is model
        assert model.layers[0].out_features == 10 + 2 * number
        torch.testing.assert_close(compiled(X).detach(), before, rtol=1e-12, atol=1e-12)
        assert backend.graphs == graphs + 1
    assert len(history(model)) == 10
    assert [volume.name for volume in outgrow.volumes(compiled, X)] == [volume.name for volume in outgrow.volumes(model, X)]


def test_a_compiled_part_of_a_model() -> None:
    backend = Counting()
    model = a_part(network(), backend)
    before, graphs = model(X).detach(), backend.graphs
    outgrow.widen(model, X, "0._orig_mod.layers.0", by=4)
    assert backend.graphs == graphs == 1
    torch.testing.assert_close(model(X).detach(), before, rtol=1e-12, atol=1e-12)
    assert backend.graphs == 2


def test_training_continues_as_without_compilation() -> None:
    model = network()
    twin = copy.deepcopy(model)
    pairs = [(model, torch.compile(model, backend="aot_eager")), (twin, twin)]
    for bare, called in pairs:
        optimizer = torch.optim.AdamW(bare.parameters(), lr=0.01)
        for growth in (outgrow.Widen("layers.0", by=4), outgrow.Deepen(after="layers.1"), None):
            for _ in range(3):
                optimizer.zero_grad()
                called(X).square().mean().backward()
                optimizer.step()
            if growth is not None:
                outgrow.grow(called, X, growth, optimizer=optimizer)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_dynamo_is_reset_only_if_something_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    real = torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: (resets.append(1), real()))
    outgrow.widen(network(), X, "layers.0", by=2)
    assert not resets
    model = network()

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:  # the closure is the only reference to the model
        return model(x).sum()

    before = step(X)
    outgrow.widen(model, X, "layers.0", by=2)
    assert len(resets) == 1
    torch.testing.assert_close(step(X), before)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_dry_run_does_not_compile_parts_of_the_model() -> None:
    """Before, dynamo compiled them together with the functions that record operators, until its limit was reached."""

    def counting(graph: fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    compiled: list[fx.GraphModule] = []
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
    model, x = nn.Sequential(torch.compile(body, backend=counting), nn.Linear(6, 2)), torch.randn(3, 4)
    events = [outgrow.At(step=1, grow=[outgrow.Widen("*", factor=1.5)])]
    outgrow.timeline(model, x, events)
    outgrow.Run(model, x, torch.optim.Adam(model.parameters()), events, quiet=True)
    assert not compiled
    model(x)
    assert compiled
