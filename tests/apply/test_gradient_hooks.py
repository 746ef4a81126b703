"""Hooks on gradients still run after a growth: those of a parameter, and those of the node that accumulates its gradient."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import VerifyError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


def node_of(parameter: Any) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def test_hooks_of_a_parameter_stay() -> None:
    model = network()
    seen: list[Any] = []
    weight: Any = model[0].weight
    weight.register_post_accumulate_grad_hook(lambda tensor: seen.append(("gathered", tuple(tensor.grad.shape))))
    weight.register_hook(lambda gradient: seen.append(("gradient", tuple(gradient.shape))))
    outgrow.widen(model, X, "*", factor=2)
    outgrow.deepen(model, X, "3")
    model(X).sum().backward()
    assert seen == [("gradient", (16, 4)), ("gathered", (16, 4))]


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_of_an_accumulator_stay_over_several_growths(kind: str) -> None:
    model = network()
    seen: list[str] = []
    nodes = [node_of(parameter) for parameter in (model[0].weight, model[2].bias, model[4].bias)]
    handles = [
        getattr(node, kind)(lambda *given, name=name: seen.append(name)) for node, name in zip(nodes, "abc", strict=True)
    ]
    for _ in range(3):
        alive = model(X).sum()  # its graph holds the accumulators
        outgrow.widen(model, X, "0", by=4)
        seen.clear()
        model(X).sum().backward()
        assert sorted(seen) == ["a", "b", "c"]
        del alive
    handles[0].remove()
    getattr(nodes[1], kind)(lambda *given: seen.append("late"))
    seen.clear()
    model(X).sum().backward()
    assert sorted(seen) == ["b", "c", "late"]
    nodes.clear()
    gc.collect()
    seen.clear()
    model(X).sum().backward()
    assert not seen  # as torch has it: hooks go with their node


def test_a_hook_may_replace_gradients_before_they_are_summed_up() -> None:
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    node = node_of(model[0].weight)
    node.register_prehook(lambda gradients: tuple(3 * gradient for gradient in gradients))
    for one in (model, twin):
        outgrow.widen(one, X, "0", by=4)
        one(X).square().sum().backward()
    assert torch.equal(model[0].weight.grad, 3 * twin[0].weight.grad)  # type: ignore[operator]
    assert torch.equal(model[2].weight.grad, twin[2].weight.grad)  # type: ignore[arg-type]


def test_hooks_over_several_gradients_and_after_a_growth_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = network(), []
    node = node_of(model[0].weight)
    node.register_hook(lambda *given: seen.append(given[1][0].shape))

    def fail(*given: Any) -> None:
        raise VerifyError("no")

    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
        with pytest.raises(VerifyError):
            outgrow.widen(model, X, "*", factor=2)
    model(X).sum().backward()
    assert seen == [(8, 4)]


def test_nothing_is_added_in_plain_training() -> None:
    model = network()
    loss = model(X).square().mean()
    loss.backward()
    alive = model(X).square().mean()  # its graph holds the accumulators
    old = node_of(model[0].weight)
    outgrow.widen(model, X, "*", factor=2)
    assert not old.metadata
    del alive
