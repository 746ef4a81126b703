"""Planning changes nothing, for every transform: the model's modules, tensors, attributes and hooks."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.engine import carry_out as execute
from outgrow.history.growths_on_model import history
from tests.helpers.judging import random_states
from tests.helpers.recorded_growths import CASES, DTYPE

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


class Listing(nn.Module):
    """A model whose code reads its parameters from a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 6)
        self.listed = [self.inner.weight, self.inner.bias]
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.outer(torch.relu(torch.nn.functional.linear(x, *self.listed))))


def test_code_with_tensors_in_a_list_of_its_own_is_planned_and_grown() -> None:
    model, example = built(lambda: (Listing().eval(), torch.randn(3, 4, dtype=DTYPE)))
    model.listed = [model.inner.weight, model.inner.bias]
    deepen = outgrow.Deepen("body.1", method="net2net"), outgrow.Deepen("body.0", method="netmorph")
    transforms = outgrow.Branch("outer"), *deepen
    before, outputs = whole(model), model(example)
    planned = outgrow.plan(model, example, *transforms)
    assert whole(model) == before
    assert outgrow.grow(model, example, *transforms).plan == planned
    torch.testing.assert_close(model(example), outputs, rtol=1e-12, atol=1e-12)
    assert model.listed[0] is model.inner.weight


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


@pytest.mark.parametrize("name", ONE_EACH)
def test_a_run_that_has_rehearsed_the_growth_gives_the_same_values(name: str) -> None:
    make, transforms = CASES[name]
    model, example = built(make)
    twin = copy.deepcopy(model)
    outgrow.grow(model, example, *transforms)
    run = outgrow.Run(twin, example, torch.optim.SGD(twin.parameters()), [outgrow.At(step=1, grow=transforms)], quiet=True)
    assert run.step() is not None
    assert [plan.to_json() for plan in history(twin)] == [plan.to_json() for plan in history(model)]
    values = twin.state_dict()
    assert list(values) == list(model.state_dict())
    assert all(torch.equal(tensor, values[path]) for path, tensor in model.state_dict().items())


FAULTS = {  # where a fault is thrown in: while the growth is planned, or while it is carried out
    "trial": ("outgrow.transforms.deepen.own_kind.apply_insert", "outgrow.transforms.deepen.new_layers.apply_insert"),
    "branch": ("outgrow.transforms.branch.apply_insert", "outgrow.transforms.branch.calls_of"),
    "graft": ("outgrow.transforms.widen.fold_residual.apply_graft", "outgrow.engine.carry_out.apply_grafts"),
    "insert": (
        "outgrow.apply.carry_out_insert.apply_insert",
        "outgrow.apply.carry_out_insert.begin",
        "outgrow.apply.carry_out_insert.close_gates",
    ),
    "optimizer": (
        "outgrow.engine.carry_out.unfreeze",
        "outgrow.engine.carry_out.add_new_parameters",
        "outgrow.engine.carry_out.grow_optimizers",
    ),
    "settings": (
        "outgrow.engine.carry_out.apply_setting",
        "outgrow.engine.carry_out.apply_plan",
        "outgrow.engine.carry_out.follow",
    ),
}


def faulty(function: Callable[..., Any], at: int, error: BaseException) -> tuple[Callable[..., Any], list[int]]:
    """A function that does its work and then, at its n-th call, raises."""
    calls = [0]

    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        calls[0] += 1
        if calls[0] == at:
            raise error
        return result

    return call, calls


FAULTY = [
    pytest.param(name, stage, marks=[pytest.mark.exhaustive] if name == "fold" and stage != "graft" else [])
    for name in ("plain soft identity", "branch copy faded", "fold", "widened")
    for stage in FAULTS
]


@pytest.mark.parametrize(("name", "stage"), FAULTY)
def test_a_fault_at_any_stage_leaves_no_trace(name: str, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, transforms = CASES[name]
    for path in FAULTS[stage]:
        owner, _, function = path.rpartition(".")
        module = importlib.import_module(owner)
        for at, error in ((1, KeyboardInterrupt()), (2, RuntimeError("thrown in"))):
            model, example = built(make)
            average = copy.deepcopy(model)
            optimizer = torch.optim.Adam(model.parameters())
            before = state(model, average, optimizer)
            call, calls = faulty(getattr(module, function), at, error)
            with monkeypatch.context() as patch:
                patch.setattr(module, function, call)
                try:
                    outgrow.grow(model, example, *transforms, optimizer=optimizer, average=average, check=False)
                except (RuntimeError, KeyboardInterrupt):
                    assert state(model, average, optimizer) == before, f"{path}, call {at}"
                else:
                    assert calls[0] < at, f"{path}, call {at}"


def state(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything that a growth may change; versions of parameters count changes that were undone too, so they are left out."""
    groups = [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
    return unversioned(whole(model)), unversioned(whole(average)), groups, len(optimizer.state), random_states()


def unversioned(thing: Any) -> Any:
    if isinstance(thing, tuple) and len(thing) == 7:  # a tensor: identity, version, shape, strides, learning, values, gradient
        return (thing[0], *thing[2:6], None if thing[6] is None else thing[6][0])
    return type(thing)(map(unversioned, thing)) if isinstance(thing, (tuple, list)) else thing
