"""`Pace` over many steps: warm-ups, steps that fail or are skipped, resumed runs, and refused arguments."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

import outgrow
from outgrow.errors import OptimizerError, ScheduleError
from outgrow.runs.cohort_rates import Pace
from tests.helpers.cohort_twins import RecordingSGD, X, Y, backward, hooks, same, small, step, twice_grown, values_of


@pytest.mark.parametrize("tensor", [False, True])
def test_a_warm_up_is_seen_by_steps_alone(tensor: bool) -> None:
    rate = torch.tensor(0.5) if tensor else 0.5
    model = small()
    one, two = list(model[0].parameters()), list(model[1:].parameters())
    optimizer, twin = (RecordingSGD([{"params": one}, {"params": two}], lr=rate) for rate in (rate, 0.5))
    scheduler, other = (schedules.ExponentialLR(o, 0.9) for o in (optimizer, twin))
    optimizer.seen, twin.seen = [], []
    pace = Pace(model, optimizer)
    pace.grown(warmup=4)
    for _ in range(7):
        step(model, optimizer)
        scheduler.step()
        twin.step()
        other.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx(other.get_last_lr(), rel=1e-6)
        assert tensor or scheduler.get_last_lr() == other.get_last_lr()
    levels = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1]
    for level, mine, plain in zip(levels, optimizer.seen, twin.seen, strict=True):
        assert mine == pytest.approx([level * rate for rate in plain], rel=1e-6)
    assert not tensor or optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"] is rate
    pace.set({})
    assert not hooks(optimizer)


def test_a_step_that_fails_leaves_no_trace() -> None:
    models = [twice_grown(), twice_grown()]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, warmup=5)

    def fails() -> float:
        raise MemoryError("none left")

    for number in range(6):
        if number in (0, 2):
            with pytest.raises(MemoryError):
                optimizers[0].step(fails)
            assert optimizers[0].state_dict()["param_groups"][0]["lr"] == 0.1
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.1
    assert same(values_of(models[0]), values_of(models[1]))


def test_closures() -> None:
    models = [twice_grown(), twice_grown()]
    optimizers = [Adam(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, train="new", hold=2, warmup=3)
    for _ in range(4):
        optimizers[0].step(lambda: backward(models[0]))
        step(models[1], optimizers[1])
    assert same(values_of(models[0]), values_of(models[1]))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused: bool) -> None:
    model = small().float()
    optimizer = SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    outgrow.widen(model, X.float(), "1.f.0", by=2, optimizer=optimizer)
    pace = Pace(model, optimizer)
    pace.grown(train="new", hold=2, warmup=9)
    for finite in (True, False, True):
        optimizer.zero_grad()
        scaler.scale((model(X.float()) - Y).square().mean()).backward()
        if not finite:
            model[0].bias.grad[0] = float("inf")
        before = values_of(model)
        scaler.step(optimizer)
        scaler.update()
        assert same(before, values_of(model)) != finite
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert pace.state_dict()["made"] == [[2, 2]]


def test_an_optimizer_built_on_another_is_scaled_once() -> None:
    Adam([nn.Parameter(torch.ones(1))])  # from now on torch calls hooks around Adam's own step too

    class Mine(Adam):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    models = [twice_grown(), twice_grown()]
    optimizers = [Mine(models[0].parameters(), lr=0.1), Adam(models[1].parameters(), lr=0.1)]
    for model, optimizer in zip(models, optimizers, strict=True):
        Pace(model, optimizer).grown(new_lr=0.5, train="new", hold=2, warmup=4)
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer)
    assert same(values_of(models[0]), values_of(models[1]))


def test_several_optimizers_count_by_themselves_and_frozen_parameters_stay() -> None:
    model = small()
    model[2].weight.requires_grad_(False)
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[1:].parameters(), lr=0.1)
    average = AveragedModel(model)
    pace = Pace(model, [first, second])
    outgrow.widen(model, X, "*", by=2, optimizer=[first, second], average=average)
    pace.grown(train="new", hold=2)
    start, mean = values_of(model), values_of(average)
    for _ in range(3):
        step(model, second)
    assert not torch.equal(model[2].bias, start["2.bias"])
    assert torch.equal(model[2].weight, start["2.weight"])
    backward(model)
    first.step()
    assert torch.equal(model[0].weight[:4], start["0.weight"][:4])
    assert not torch.equal(model[0].weight[4:], start["0.weight"][4:])
    assert same(values_of(average), mean)


def test_factors_stay_right_if_a_part_grows_without_a_call_of_grown() -> None:
    model = small()
    optimizer = SGD(model.parameters(), lr=0.05)
    pace = Pace(model, optimizer)
    pace.set({0: 0.0})
    outgrow.widen(model[1], torch.randn(4, 4).double(), "f.0", by=2, optimizer=optimizer)
    start = values_of(model)
    step(model, optimizer)
    assert (model[1].f[0].bias == start["1.f.0.bias"]).tolist() == [True] * 6 + [False] * 2
    assert torch.equal(model[0].weight, start["0.weight"])


def test_low_precision_and_updates_that_are_not_finite() -> None:
    model = nn.Linear(3, 2).bfloat16()
    optimizer = SGD(model.parameters(), lr=0.1)
    pace = Pace(model, optimizer)
    pace.set({0: 0.5})
    before = model.weight.detach().clone().float()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.allclose(model.weight.float(), before - 0.05, atol=0.004)
    pace.set({0: 0.0})
    kept = values_of(model)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    optimizer.step()
    assert same(values_of(model), kept)


def make_run(path: Path | None = None, state: Any = None) -> tuple[nn.Module, Optimizer, Any, Pace]:
    """A run that has just grown, or one that is resumed from a saved state."""
    model = small() if path is None else outgrow.load(small(), path)
    optimizer = AdamW(model.parameters(), lr=0.02)
    scheduler = schedules.OneCycleLR(optimizer, 0.05, 40)
    pace = Pace(model, optimizer)
    if path is None:
        for event in ({"new_lr": 1.3}, {"new_lr": 0.7, "train": "new", "hold": 6, "warmup": 8}):
            outgrow.grow(model, X, outgrow.Widen("1.f.0", by=2), outgrow.Deepen(after="1"), optimizer=optimizer)
            pace.grown(**event)
    else:
        optimizer.load_state_dict(state[0])
        scheduler.load_state_dict(state[1])
        pace.load_state_dict(json.loads(state[2]))
    return model, optimizer, scheduler, pace


@pytest.mark.parametrize("moment", [0, 3, 6, 7, 9])
def test_a_resumed_run_is_the_same_to_the_last_bit(moment: int, path: Path) -> None:
    model, optimizer, scheduler, pace = make_run()
    for number in range(14):
        if number == moment:
            outgrow.save(model, path)
            saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict())), json.dumps(pace.state_dict())
        step(model, optimizer)
        scheduler.step()
    again, resumed, schedule, taken = make_run(path, (*saved[0], saved[1]))
    for _ in range(moment, 14):
        step(again, resumed)
        schedule.step()
    assert same(values_of(model), values_of(again))
    assert taken.state_dict() == pace.state_dict()
    assert taken.factors == {0: 1.0, 1: 1.3, 2: 0.7}


def test_line_searches_are_refused_and_all_is_as_before() -> None:
    model = twice_grown()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    pace = Pace(model, optimizer)
    known = pace.state_dict()
    for change in (lambda: pace.set({0: 0.5}), lambda: pace.grown(new_lr=2.0, warmup=3)):
        with pytest.raises(OptimizerError, match=r"(?s)LBFGS.*stores its own steps.*leave new_lr="):
            change()
        assert pace.state_dict() == known
        assert not hooks(optimizer)
    pace.grown(warmup=3)
    before = backward(model)
    optimizer.step(lambda: backward(model))
    assert backward(model) < before


@pytest.mark.parametrize(
    ("call", "error", "reason"),
    [
        (lambda pace: pace.set({3: 1.0}), OptimizerError, "no cohort 3: the model has grown 2 times"),
        (lambda pace: pace.set({0: -1.0}), OptimizerError, "not negative"),
        (lambda pace: pace.set({0: float("nan")}), OptimizerError, "not negative"),
        (lambda pace: pace.grown(train="old"), ScheduleError, "train='old'"),
        (lambda pace: pace.grown(hold=3), ScheduleError, "add train='new'"),
        (lambda pace: pace.grown(warmup=0), ScheduleError, "warmup=0"),
        (lambda pace: pace.grown(new_lr=-2.0), OptimizerError, "a factor of -2.0 for cohort 2"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "made": []}), OptimizerError, "of 0 optimizers"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "held_before": 4}), OptimizerError, "grew 4 times"),
        (lambda pace: pace.load_state_dict({**pace.state_dict(), "factors": {"7": 2.0}}), OptimizerError, "no cohort 7"),
    ],
)
def test_meaningless_arguments_are_refused(call: Callable[[Pace], None], error: type[Exception], reason: str) -> None:
    model = twice_grown()
    pace = Pace(model, SGD(model.parameters(), lr=0.1))
    pace.set({1: 2.0})
    known = pace.state_dict()
    with pytest.raises(error, match=reason):
        call(pace)
    assert pace.state_dict() == known
