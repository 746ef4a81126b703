"""Schedules, groups and wrapped optimizers continue after a growth; state without a rule is refused, and nothing changes."""

from __future__ import annotations

import copy
import importlib
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import outgrow
from outgrow.errors import OptimizerError, VerifyError
from outgrow.optimizers.grow_optimizers import check_optimizers
from tests.helpers.torch_optimizers import Side, backward, batches, network, snapshot, train

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "LambdaLR": lambda o: schedules.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.01, total_steps=10),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "SequentialLR": lambda o: schedules.SequentialLR(o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], [3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_on(name: str) -> None:
    """Rates and momenta are the same with and without a growth in between."""
    data, seen = batches("", 8), {False: [], True: []}
    for grows in seen:
        model = network()
        groups = [{"params": model[:5].parameters()}, {"params": model[5:].parameters(), "lr": 1e-4}]
        optimizer = torch.optim.SGD(groups, lr=1e-3, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        for index, batch in enumerate(data):
            if grows and index == 4:
                outgrow.widen(model, batch[0], "*", factor=1.5, optimizer=optimizer)
            train(model, optimizer, [batch])
            schedule.step()
            seen[grows].append([(group["lr"], group["momentum"]) for group in optimizer.param_groups])
    assert seen[False] == seen[True]


def test_groups_names_frozen_and_tied_parameters_stay_in_their_places_also_of_a_wrapped_optimizer() -> None:
    def groups() -> list[dict[str, Any]]:
        return [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]

    model, batch = Side(tied=True), (torch.randn(5, 4).double(), torch.zeros(5, 2).double())
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": named[3:], "lr": 0.1}, {"params": named[:3], "weight_decay": 0.0}])
    train(model, optimizer, [batch])
    model.a.bias.requires_grad_(False)  # frozen with a past
    before, wrapped = groups(), SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    outgrow.widen(model, batch[0], "*", to=5, method="net2net", optimizer=[optimizer, wrapped, optimizer])  # grown once
    assert groups() == before
    assert before[1]["param_names"] == ["a.weight", "a.bias", "b.bias"]
    assert len(optimizer.state) == 5
    assert all(s["exp_avg"].shape == s["exp_avg_sq"].shape == p.shape for p, s in optimizer.state.items())
    train(model, optimizer, [batch])


class Odd(torch.optim.Optimizer):
    def __init__(self, model: nn.Module, make: Callable[[Tensor], Any] = torch.ones_like) -> None:
        super().__init__(model.parameters(), {})
        self.make = make

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("curvature", self.make(parameter))


class Described(Odd):
    """An optimizer whose state is described, except for one key."""


class Square(Odd):
    """An optimizer whose state is described wrongly."""


outgrow.register_optimizer(Described, {"exp_avg": "first moment"})
outgrow.register_optimizer(Square, {"curvature": "second moment"})
REFUSED: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "unknown": (Odd, r"Odd is none of the classes(.|\n)*outgrow.register_optimizer\(Odd"),
    "unknown key": (Described, "Described's state 'curvature' has no rule in outgrow: a tensor of shape"),
    "matrices": (lambda model: Square(model, lambda p: torch.eye(7)), r"has shape \(7, 7\) instead of"),
    "nested": (lambda model: Described(model, lambda p: {"left": [torch.eye(2)]}), "of type dict, with tensors inside"),
    "in an object": (
        lambda model: Described(model, lambda p: SimpleNamespace(left=torch.eye(2))),
        "SimpleNamespace, with tensors inside",
    ),
    "in a queue": (lambda model: Described(model, lambda p: deque([torch.ones_like(p)])), "of type deque, with tensors inside"),
    "LBFGS": (lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2), "flat vectors(.|\n)*make a new optimizer"),
    "foreign": (lambda model: torch.optim.Adam(network().parameters()), "belongs to another model"),
    "no optimizer": (lambda model: SimpleNamespace(step=lambda closure: None), "SimpleNamespace is no optimizer"),
    "too late": (lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), "as if it were wrong"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_everything_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        assert good.state[model[5].weight]["exp_avg"].shape == model[5].weight.shape != (6, 12)
        raise VerifyError("as if it were wrong")

    model, data = network(), batches("", 2)
    good, bad = torch.optim.Adam(model.parameters()), REFUSED[name][0](model)
    train(model, good, data)
    bad.step(lambda: backward(model, data[0]))
    before, objects = snapshot(model, good, bad), {id(value) for state in good.state.values() for value in state.values()}
    monkeypatch.setattr(importlib.import_module("outgrow.verify.outputs"), "check", fail)
    with pytest.raises((OptimizerError, VerifyError), match=REFUSED[name][1]):
        outgrow.widen(model, data[0][0], "*", factor=1.5, optimizer=[good, bad])
    assert snapshot(model, good, bad) == before
    assert objects == {id(value) for state in good.state.values() for value in state.values()}
    good.step()


def test_all_problems_are_reported_before_anything_changes() -> None:
    odd = Described(model := network())
    odd.step()
    plan = outgrow.widen(copy.deepcopy(model), batches("", 1)[0][0], ["5", "7"], by=2).plan
    with pytest.raises(OptimizerError) as caught:
        check_optimizers([odd], model, plan)
    assert {problem.where for problem in caught.value.problems} == {"5.weight", "5.bias", "7.weight", "7.bias", "9.weight"}
