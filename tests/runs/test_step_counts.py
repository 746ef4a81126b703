"""A new optimizer in the middle of a run is detected at its first step, not at the next growth."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import outgrow
from outgrow.errors import OptimizerError
from tests.helpers.small_runs import DEEPEN, WIDEN, X, facts, mlp, same, train
from tests.helpers.training_run import assert_equal


def run_of(model: nn.Module, optimizer: Any, **options: Any) -> outgrow.Run:
    schedule = [outgrow.At(step=2, grow=[WIDEN]), outgrow.At(step=6, grow=[DEEPEN])]
    return outgrow.Run(model, X, optimizer, schedule, quiet=True, **options)


def advance(model: nn.Module, optimizers: Any, run: outgrow.Run, until: int) -> None:
    while run.steps < until:
        train(model, optimizers, run.steps)
        run.step()


def test_a_new_optimizer_is_detected_at_its_first_step() -> None:
    model = mlp()
    run = run_of(model, AdamW(model.parameters(), lr=1e-2))
    advance(model, run.optimizers[0], run, 3)
    new = AdamW(model.parameters(), lr=1e-3)
    before = copy.deepcopy(run.position())
    train(model, new, 3)
    state = facts(model, [new])
    with pytest.raises(OptimizerError, match=r"AdamW: it trains stem.weight and 11 more[\s\S]*position=position"):
        run.step()
    assert_equal(run.position(), before)
    assert_equal(facts(model, [new]), state)


def test_the_way_out_leads_to_the_same_run() -> None:
    """The reference is a loop by hand, which grows at the same steps."""
    model, twin = mlp(), mlp()
    run = run_of(model, SGD(model.parameters(), lr=0.1))
    advance(model, run.optimizers[0], run, 3)
    new = AdamW(model.parameters(), lr=1e-3)
    train(model, new, 3)
    with pytest.raises(OptimizerError):
        run.step()
    position = run.position()
    run = run_of(model, new, position=position)
    run.go_to(position)
    run.step()
    advance(model, new, run, 8)
    assert len(run.records) == 2

    optimizer: Any = SGD(twin.parameters(), lr=0.1)
    for step in range(8):
        optimizer = AdamW(twin.parameters(), lr=1e-3) if step == 3 else optimizer
        train(twin, optimizer, step)
        if step + 1 in (2, 6):
            number = (2, 6).index(step + 1)
            outgrow.grow(twin, X, (WIDEN, DEEPEN)[number], optimizer=optimizer, seed=number)
    assert same(model, twin)


def test_optimizers_of_other_models_and_additional_optimizers_are_accepted() -> None:
    model, other = mlp(), mlp(1)
    own, stranger = AdamW(model.parameters(), lr=1e-2), AdamW(other.parameters(), lr=1e-2)
    beside = SGD([{"params": model.head.parameters()}], lr=1e-3)
    run = run_of(model, own)
    for step in range(2):
        train(model, [own, beside], step)  # a second one, which was not passed to the run
        train(other, stranger, step)
        run.step()
    train(other, stranger, 2)
    run.step()  # the run's own optimizer made no step, e.g. because a GradScaler found infinities
    assert run.steps == 3


def test_parts_that_no_run_trains_may_have_optimizers_of_their_own() -> None:
    model = mlp()
    parts = [SGD(model.blocks.parameters(), lr=0.1), SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1)]
    run = outgrow.Run(model, X, parts[0], [outgrow.At(step=5, grow=[WIDEN])], quiet=True)
    train(model, parts[1], 0)  # the two train in turn
    run.step()
    train(model, parts[0], 1)
    run.step()
    assert run.steps == 2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # the hook of fades in other tests
def test_a_compiled_step_is_accepted() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    run = run_of(model, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(2):
        train(model, [], number)
        step()
        run.step()
    assert run.steps == 2
