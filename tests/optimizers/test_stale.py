"""An optimizer that was left out of a growth is stopped before it steps with state of the old shapes."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

import outgrow
from outgrow.errors import StaleOptimizerError
from outgrow.optimizers.stale import _WATCH
from tests.helpers.torch_optimizers import backward, batches, each_optimizer, make, network, snapshot, train, trainable


@each_optimizer
def test_an_optimizer_that_was_left_out_is_stopped_before_it_steps(case: str, how: str) -> None:
    model, data = network(case), batches(case, 2)
    optimizer = make(case, how, trainable(model, case))
    train(model, optimizer, data)
    outgrow.widen(model, data[0][0], "*", factor=2)
    backward(model, data[0])
    before, past = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StaleOptimizerError, match=r"optimizer=optimizer(.|\n)*has shape"):
        optimizer.step()
    assert snapshot(model, optimizer) == before
    fresh = make(case, how, trainable(model, case))
    train(model, fresh, data)
    right = copy.deepcopy(fresh.state_dict())
    fresh.load_state_dict(past)  # from before the growth: torch takes it without a word
    backward(model, data[0])
    with pytest.raises(StaleOptimizerError):
        fresh.step()
    optimizer.load_state_dict(right)
    train(model, optimizer, data)


def test_a_stale_lbfgs_is_stopped_and_what_is_not_stale_steps_freely() -> None:
    model, other, data = network(), network(), batches("", 1)
    bystander, head = torch.optim.Adam(other.parameters(), fused=True), torch.optim.Adam([model[9].bias], fused=True)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4)
    stale, unused = (torch.optim.LBFGS(model.parameters(), max_iter=3) for _ in range(2))
    train(other, bystander, data)
    for optimizer in (head, plain, stale):
        optimizer.step(lambda: backward(model, data[0]))
    outgrow.widen(model, data[0][0], "*", factor=1.5, optimizer=unused)
    with pytest.raises(StaleOptimizerError, match=r"state can.t grow: make a new optimizer(.|\n)*flat history"):
        stale.step(lambda: backward(model, data[0]))
    train(other, bystander, data)
    for optimizer in (head, plain, unused, torch.optim.LBFGS(model.parameters(), max_iter=3)):
        optimizer.step(lambda: backward(model, data[0]))


def test_the_watch_is_set_once_by_the_first_growth_and_keeps_nothing_alive() -> None:
    model, data = network(), batches("", 1)
    outgrow.widen(model, data[0][0], "5", by=2)
    gc.collect()  # models of other tests
    hooks, watched = len(_global_optimizer_pre_hooks), len(_WATCH.grown)
    outgrow.widen(model, data[0][0], "5", by=2)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, data)
    assert (len(_global_optimizer_pre_hooks), len(_WATCH.grown), [one for one, _ in _WATCH.checked]) == (
        hooks,
        watched,
        [optimizer],
    )
    del model, optimizer
    gc.collect()
    assert len(_WATCH.grown) <= watched - 3
    assert not len(_WATCH.checked)
    importing = "import outgrow, torch.optim.optimizer as o; assert not o._global_optimizer_pre_hooks"
    averages = "; from torch.optim.swa_utils import AveragedModel as A; assert not hasattr(A.update_parameters, '__wrapped__')"
    subprocess.run([sys.executable, "-c", importing + averages], check=True)
