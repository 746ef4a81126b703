"""Planning leaves everything as it was, for every transform: the model's modules, tensors, attributes and hooks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from judging import random_states
from outgrow import execute
from outgrow.training.history import history
from recorded_growths import CASES, DTYPE

ONE_EACH = (  # a case for each way in which a transform plans
    *("images auto", "images auto 7", "images residual", "features two", "plain net2net", "plain soft identity"),
    *("plain split", "skips behind", "encoder", "language", "language both", "branch auto", "branch of a layer auto"),
    *("branch copy faded", "fold", "all", "widened"),
)


def seen(thing: Any) -> Any:
    """Plain data that is equal only if nothing was written: tensors by identity and values, parameters by version too.

    Batch statistics that a forward pass has moved are put back by a copy, which counts as a new version of the buffer.
    """
    if isinstance(thing, Tensor):
        gradient = None if not thing.is_leaf or thing.grad is None else (id(thing.grad), thing.grad._version)
        values = "" if thing.is_meta else thing.detach().numpy().tobytes()
        version = thing._version if isinstance(thing, nn.Parameter) else 0
        return id(thing), version, tuple(thing.shape), thing.stride(), thing.requires_grad, values, gradient
    if isinstance(thing, dict):
        return id(thing), [(key, seen(value)) for key, value in thing.items()]
    if isinstance(thing, (list, tuple, set)):
        return id(thing), [seen(item) for item in thing]
    if hasattr(thing, "to_dict"):  # a configuration
        return id(thing), json.dumps(thing.to_dict(), default=str, sort_keys=True)
    return thing if isinstance(thing, (int, float, str, bool, type(None))) else id(thing)


def whole(model: nn.Module) -> Any:
    """All modules, each with its class and all that it holds; containers by identity and contents."""
    return [(path, id(one), type(one), seen(vars(one))) for path, one in model.named_modules(remove_duplicate=False)]


def built(make: Callable[[], tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model, example = make()
    model = model.to(DTYPE)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda gradient: gradient)
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: None)
    return model, example


class Reached(Exception):
    """Raised where a growth would make its first change."""


@pytest.mark.parametrize("name", ONE_EACH)
def test_nothing_is_touched_before_apply(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, transforms = CASES[name]
    model, example = built(make)
    average, real = copy.deepcopy(model), execute.Work.carry_out
    optimizer = torch.optim.Adam(model.parameters())
    changing = []

    def carry_out(self: execute.Work, step: Any) -> None:
        if self.copies:  # the growth itself; trials have no averaged copies
            changing.append(True)
            raise Reached
        real(self, step)

    monkeypatch.setattr(execute.Work, "carry_out", carry_out)
    before = whole(model), whole(average), random_states()
    with pytest.raises(Reached):
        outgrow.grow(model, example, *transforms, optimizer=optimizer, average=average, check=False)
    assert changing
    assert (whole(model), whole(average), random_states()) == before


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_plan_is_what_the_growth_does_and_changes_nothing(name: str) -> None:
    make, transforms = CASES[name]
    model, example = built(make)
    before = whole(model), random_states()
    planned = outgrow.plan(model, example, *transforms, seed=4)
    assert (whole(model), random_states()) == before
    assert not history(model)
    growth = outgrow.grow(model, example, *transforms, seed=4)
    assert growth.plan == planned
    assert str(growth.plan) == str(planned)
    assert planned.inserts == growth.plan.inserts
    assert [insert.start for insert in planned.inserts] == [insert.start for insert in growth.plan.inserts]
    assert set(planned.new_blocks) <= set(dict(model.named_modules()))


@pytest.mark.parametrize("name", [name for name in ONE_EACH if not name.startswith("language")])  # whose mask reads values
def test_a_model_without_values_gets_the_same_plan(name: str) -> None:
    make, transforms = CASES[name]
    model, example = built(make)
    planned = outgrow.plan(model, example, *transforms, seed=4)
    hollow = copy.deepcopy(model).to("meta")
    example = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), example)
    before = whole(hollow)
    assert outgrow.plan(hollow, example, *transforms, seed=4) == planned
    assert whole(hollow) == before
    stages = outgrow.timeline(hollow, example, [outgrow.At(step=1, grow=transforms)]).stages
    assert stages[1].changes == planned.changes


def test_a_model_that_can_not_be_copied_is_planned_and_grown() -> None:
    class Locked(nn.Sequential):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies")

    make, transforms = CASES["images two"]
    model, example = built(make)
    model = Locked(*model)
    planned = outgrow.plan(model, example, *transforms)
    before = model.eval()(example)
    assert outgrow.grow(model, example, *transforms).plan == planned
    torch.testing.assert_close(model(example), before)


def test_the_plan_holds_how_new_modules_start() -> None:
    make, _ = CASES["images two"]
    model, example = built(make)
    identity = outgrow.plan(model, example, outgrow.Deepen("2", method="net2net")).inserts[0]
    assert identity.start.identity == "2"
    pairs = outgrow.plan(model, example, outgrow.Deepen("3.1", method="r2r-paper")).inserts[0]
    assert {write.tensor for write in pairs.start.writes} >= {"a.weight", "b.weight"}
    faded = outgrow.plan(model, example, outgrow.Deepen("3.1", fade=9)).inserts[0]
    assert (faded.start.gates, faded.start.steps, faded.start.writes) == (("m",), 9, ())


def test_a_history_keeps_no_starts() -> None:
    make, transforms = CASES["images two"]
    model, example = built(make)
    outgrow.grow(model, example, *transforms)
    assert all(not insert.start.writes for plan in history(model) for insert in plan.inserts)
