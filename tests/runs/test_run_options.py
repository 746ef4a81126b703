"""Options of events: rates, weight decay, warm-ups, training of new entries only, and a reset of the optimizer's state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import outgrow
from outgrow.history.cohorts import cohorts
from tests.helpers.small_runs import DEEPEN, WIDEN, X, at, facts, loss_of, mlp, started, train
from tests.helpers.training_run import assert_equal

LATER = outgrow.Widen("blocks.1.up", to=10)


def pair(lr: float = 0.1) -> tuple[Any, Optimizer, Any, Optimizer]:
    """A model, and a copy that is grown and trained by hand; with plain gradient descent, updates can be computed by hand."""
    model, twin = mlp(), mlp()
    return model, SGD(model.parameters(), lr=lr), twin, SGD(twin.parameters(), lr=lr)


def test_weight_decay() -> None:
    model = mlp()
    groups = [{"params": model.stem.parameters(), "weight_decay": 0.0}, {"params": model.blocks.parameters()}]
    optimizer = AdamW(groups, lr=1e-2, weight_decay=0.2)
    run = started(model, optimizer, [at(2, weight_decay=0.5), at(4, LATER, weight_decay=0)])
    seen = []
    for step in range(1, 6):
        train(model, optimizer, step)
        run.step()
        seen.append([group["weight_decay"] for group in optimizer.param_groups])
    assert seen == [[0.0, 0.2], [0.0, 0.1], [0.0, 0.1], [0.0, 0.0], [0.0, 0.0]]


def test_a_warm_up() -> None:
    model, optimizer, twin, other = pair()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run = started(model, optimizer, [at(3, WIDEN, DEEPEN, warmup=4)], scheduler)
    for step in range(1, 10):
        rate = 0.1 * 0.5 ** ((step - 1) // 3)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12), "between steps nothing is to be seen of it"
        train(model, optimizer, step)
        scheduler.step()
        run.step()
        other.param_groups[0]["lr"] = rate * (min(step - 3, 4) / 4 if step > 3 else 1)
        train(twin, other, step)
        if step == 3:
            outgrow.grow(twin, X, WIDEN, DEEPEN, optimizer=other)
    assert_close(model, twin)


def assert_close(model: nn.Module, twin: nn.Module) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-11, atol=1e-14)


def test_a_rate_for_new_entries() -> None:
    model, optimizer, twin, other = pair()
    run = started(model, optimizer, [at(2, WIDEN, DEEPEN, new_lr=1.3), at(4, LATER)])
    for step in range(1, 8):
        train(model, optimizer, step)
        run.step()
        old = {name: p.detach().clone() for name, p in twin.named_parameters()}
        train(twin, other, step)
        born = cohorts(twin)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.add_((born[name] == 1).double() * 0.3 * (parameter - old[name]))
        if step in (2, 4):
            outgrow.grow(twin, X, *((WIDEN, DEEPEN) if step == 2 else (LATER,)), optimizer=other, seed=0 if step == 2 else 1)
    assert run.pace.factors == {0: 1.0, 1: 1.3, 2: 1.0}
    assert_close(model, twin)


@pytest.mark.parametrize("hold", [2, None])
def test_training_of_new_entries_only(hold: int | None) -> None:
    """Earlier entries stay equal to the last bit for `hold` steps, or until the next growth; new entries change."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = started(model, optimizer, [at(2, WIDEN, DEEPEN, train="new", hold=hold), at(6, LATER)])
    for step in range(1, 9):
        before, born = {name: p.detach().clone() for name, p in model.named_parameters()}, cohorts(model)
        train(model, optimizer, step)
        held = 2 < step <= (6 if hold is None else 2 + hold)
        moved: dict[int, bool] = {}
        for name, parameter in model.named_parameters():
            for cohort in range(born.count + 1):
                entries = (born[name] == cohort).expand(parameter.shape)
                moved[cohort] = moved.get(cohort, False) or bool((before[name] != parameter)[entries].any())
        assert moved == {cohort: not held or cohort > 0 for cohort in range(born.count + 1)}, step
        run.step()


def test_a_reset_of_the_optimizers_state() -> None:
    model, twin = mlp(), mlp()
    optimizer, other = AdamW(model.parameters(), lr=1e-2), AdamW(twin.parameters(), lr=1e-2)
    run = started(model, optimizer, [at(3, WIDEN, DEEPEN, state="fresh")])
    for step in range(1, 7):
        train(model, optimizer, step)
        run.step()
        train(twin, other, step)
        if step == 3:
            assert not optimizer.state
            outgrow.grow(twin, X, WIDEN, DEEPEN)
            other = AdamW(twin.parameters(), lr=1e-2)
    assert_equal(facts(model, [optimizer]), facts(twin, [other]))


def test_rates_without_a_scheduler_and_one_that_was_left_out() -> None:
    model, optimizer, twin, other = pair()
    run = started(model, optimizer, [at(2, lr=0.2)])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(other, 0.9)
    with pytest.warns(UserWarning, match="Pass it: outgrow.Run"):
        started(twin, other, [at(2, lr=0.2)])
    started(twin, other, [at(2, lr=0.2)], scheduler)
    started(twin, other, [at(2)])
    for step in range(1, 4):
        train(model, optimizer, step)
        run.step(loss_of(model, step))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02, rel=1e-12)
