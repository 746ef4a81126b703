"""Optimizer state goes on after a growth as if the grown network had been trained from the start.

The truth for moments is made by brute force: the network of every past step is grown by the same plan, the batch of that step
gives its gradients by autograd, and a new optimizer of the same class gathers them.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import outgrow
from outgrow.apply.grow_tensor import grown_moment
from outgrow.growth_plan.plan import Insertion, Rescaling
from tests.helpers.torch_optimizers import (
    CASES,
    MEAN,
    ZERO,
    Side,
    backward,
    batches,
    close,
    each_optimizer,
    make,
    network,
    new_entries,
    replayed,
    train,
    trainable,
)


def test_every_optimizer_of_torch_is_covered_here() -> None:
    names = {n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    assert names == {case.split()[0] for case in CASES} | {"LBFGS", "Optimizer"}


@each_optimizer
def test_after_copying_units_the_state_is_that_of_a_replay_on_the_grown_network(case: str, how: str) -> None:
    model, data = network(case), batches(case, 5)
    optimizer = make(case, how, trainable(model, case))
    past = train(model, optimizer, data)
    whole = case == "Adafactor"  # row and column means determine all only if every unit gets the same share
    method = outgrow.Net2Net() if whole else outgrow.Net2Net(split="random", mapping="random")
    growth = outgrow.widen(model, data[0][0], "*", factor=2 if whole else 1.6, method=method, optimizer=optimizer)
    truth = replayed(case, how, past, data, growth.plan)
    for parameter, true in zip(trainable(model, case), truth, strict=True):
        state = optimizer.state[parameter]
        assert set(state) == set(true)
        for key in set(state) - {"ax"}:  # an average of parameters, not of gradients: tested below
            close(state[key], true[key])


@each_optimizer
def test_new_units_start_without_a_past_and_training_goes_on(case: str, how: str) -> None:
    model, data = network(case), batches(case, 8)
    optimizer = make(case, how, trainable(model, case))
    past = train(model, optimizer, data[:4])
    old = [dict(optimizer.state[parameter]) for parameter in trainable(model, case)]
    growth = outgrow.widen(model, data[0][0], "*", factor=1.5, method="r2r", optimizer=optimizer)
    truth = replayed(case, how, past, data[:4], growth.plan)
    seen = set()
    for parameter, before, true in zip(trainable(model, case), old, truth, strict=True):
        state, new = optimizer.state[parameter], new_entries(growth.plan, model, parameter)
        for key in set(before) & (ZERO | MEAN):
            assert state[key].shape == parameter.shape
            close(state[key][~new], true[key][~new])
            if new.any():
                seen.add(key)
                close(state[key][new], (before[key] if key in MEAN else before[key] * 0).mean().expand(int(new.sum())))
        if "row_var" in before:  # what Adafactor divides by stays for existing entries
            square, then = (s["row_var"] * s["col_var"] / s["row_var"].mean(-2, keepdim=True) for s in (state, before))
            close(square[~new], then.flatten())
            assert (square >= 0).all()
    assert seen == {key for before in old for key in before if key in ZERO | MEAN}
    twin = copy.deepcopy(model)
    other = make(case, how, trainable(twin, case))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[4:])
    train(twin, other, data[4:])
    for parameter, loaded in zip(model.parameters(), twin.parameters(), strict=True):
        close(parameter, loaded)  # not bit by bit: loading makes NAdam's float32 scalars float64


@pytest.mark.parametrize("method", ["r2r", "netmorph", outgrow.Net2Net(split="random"), outgrow.R2R(init="copy", scale=0.5)])
def test_asgd_averages_stay_the_network_that_they_were(method: Any) -> None:
    def averaged() -> Tensor:
        weights = {name: optimizer.state[parameter]["ax"] for name, parameter in model.named_parameters()}
        return torch.func.functional_call(copy.deepcopy(model).eval(), weights, data[0][0])

    model, data = network(), batches("", 5)
    optimizer = make("ASGD", "", model.parameters())
    train(model, optimizer, data)
    before = averaged()
    assert (before - copy.deepcopy(model).eval()(data[0][0])).abs().max() > 1e-4
    growth = outgrow.widen(model, data[0][0], "*", factor=1.5, method=method, optimizer=optimizer)
    torch.testing.assert_close(averaged(), before, rtol=1e-10, atol=1e-10)
    drawn = new_entries(growth.plan, model, model[5].weight) & (method == "r2r")
    assert torch.equal(optimizer.state[model[5].weight]["ax"][drawn], model[5].weight[drawn])


@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_a_gradient_transforms_as_autograd_says_in_every_order_of_edits(order: list[str]) -> None:
    model, batch = Side(tied=False), (torch.randn(7, 4).double(), torch.randn(7, 2).double())
    backward(model, batch)
    outgrow.widen(model, batch[0], order, by=2, method=outgrow.Net2Net(split="random"))
    moved = [parameter.grad for parameter in model.parameters()]
    backward(model, batch)
    for parameter, gradient in zip(model.parameters(), moved, strict=True):
        close(gradient, parameter.grad)


def test_new_entries_start_at_the_mean_of_what_is_there_by_then() -> None:
    old = torch.rand(3).double().requires_grad_()
    new = (2.0 * old.detach()).requires_grad_()
    (old.pow(3).sum() + (new / 2.0).pow(3).sum()).backward()
    edits = [Rescaling("t", 2.0), Insertion("t", 0, 3, (1,), (0,), "free", (0,), (1.0,))]
    for power, fresh in ((1, "zero"), (2, "mean")):
        moment = grown_moment(old.grad**power, edits, power, fresh)
        close(moment[[0, 2, 3]], new.grad**power)
        close(moment[1], (new.grad**power).mean() * (fresh == "mean"))
    halves = (0.5, 0.5)
    copies = Insertion("t", 0, 2, (2, 3), (0, 1), "copy", (), halves, (0, 1), gradient=halves, gradient_keep=halves)
    edits, square = [copies, Insertion("t", 1, 3, (3,), (0,), "free", (0,), (1.0,))], torch.rand(2, 3).double()
    moment = grown_moment(square, edits, 2, "mean")
    close(moment[:, 3], moment[:, :3].mean().expand(4))
