"""Every optimizer of torch on a small network, and by brute force the state that it should have after a growth."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from outgrow.apply.apply_plan import apply_plan
from outgrow.growth_plan.plan import Plan
from outgrow.model.journal import Journal

TINY = 1e-30
CASES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5},
    "SGD nesterov": {"lr": 1e-3, "momentum": 0.9, "nesterov": True, "maximize": True},
    "Adam": {"eps": TINY},
    "Adam amsgrad": {"eps": TINY, "amsgrad": True, "maximize": True},
    "AdamW": {"eps": TINY},
    "NAdam": {"eps": TINY, "decoupled_weight_decay": True},
    "RAdam": {"eps": TINY},
    "Adamax": {"eps": TINY},
    "Adagrad": {"eps": TINY},
    "Adadelta": {"eps": TINY},
    "RMSprop": {"lr": 1e-3, "eps": TINY},
    "RMSprop centered": {"lr": 1e-3, "eps": TINY, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 1e-3},
    "Muon": {"weight_decay": 0.0},
    "Adafactor": {"lr": 1e-3},
    "SparseAdam": {"eps": TINY},
    "ASGD": {"lr": 1e-3, "t0": 0.0, "lambd": 0.0},
}
PLAIN = {"Muon", "SparseAdam"}  # no choice of implementation
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
ZERO = {"exp_avg", "momentum_buffer", "grad_avg", "prev"}
MEAN = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "step_size", "variance"}
CASES = {case: options for case, options in CASES.items() if hasattr(torch.optim, case.split()[0])}  # Muon is from torch 2.9 on
HOWS = {case: ["", *["foreach"] * (case not in PLAIN), *["fused"] * (case.split()[0] in FUSED)] for case in CASES}
each_optimizer = pytest.mark.parametrize(("case", "how"), [(case, how) for case, hows in HOWS.items() for how in hows])
Batch = tuple[Tensor, Tensor]


def make(case: str, how: str, params: Any) -> torch.optim.Optimizer:
    choice = {"": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[how] if case not in PLAIN else {}
    return getattr(torch.optim, case.split()[0])(params, **CASES[case], **choice)


def network(case: str = "") -> nn.Sequential:
    torch.manual_seed(0)
    if case == "SparseAdam":
        return nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 3)).double()
    head = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2), nn.Flatten()
    return nn.Sequential(*head, nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


def batches(case: str, count: int) -> list[Batch]:
    torch.manual_seed(1)
    inputs = torch.randint(0, 9, (count, 7)) if case == "SparseAdam" else torch.randn(count, 7, 2, 4, 4, dtype=torch.float64)
    return list(zip(inputs, torch.randn(count, 7, 3, dtype=torch.float64), strict=True))


def trainable(model: nn.Module, case: str) -> list[nn.Parameter]:
    """Muon takes matrices, SparseAdam parameters with sparse gradients."""
    return [p for p in model[: 1 if case == "SparseAdam" else None].parameters() if p.ndim == 2 or case != "Muon"]


def backward(model: nn.Module, batch: Batch) -> Tensor:
    model.zero_grad()
    loss = (model(batch[0]) - batch[1]).pow(2).mean() * 100
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Batch]) -> list[dict[str, Tensor]]:
    """Train one step per batch; returns the network before each step."""
    past = []
    for batch in data:
        past.append(copy.deepcopy(model.state_dict()))
        assert backward(model, batch).isfinite()
        optimizer.step()
    model.zero_grad()
    return past


def replayed(case: str, how: str, past: list[dict[str, Tensor]], data: list[Batch], plan: Plan) -> list[dict[str, Any]]:
    """The state of an optimizer that has seen the gradients of the grown networks of all past steps."""
    optimizer, reference = None, []
    for weights, batch in zip(past, data, strict=True):
        model = network(case)
        model.load_state_dict(weights)
        apply_plan(model, plan, {}, Journal())
        backward(model, batch)
        reference = reference or [nn.Parameter(p.detach().clone()) for p in trainable(model, case)]
        optimizer = optimizer or make(case, how, reference)
        for parameter, then in zip(reference, trainable(model, case), strict=True):
            parameter.grad = then.grad
        optimizer.step()
    return [optimizer.state[parameter] for parameter in reference]


def new_entries(plan: Plan, model: nn.Module, parameter: Tensor) -> Tensor:
    """A mask of a parameter's new entries, if each of its axes has grown once at most."""
    name = next(name for name, other in model.named_parameters() if other is parameter)
    new = torch.zeros(parameter.shape, dtype=torch.bool)
    for edit in plan.edits:
        if edit.tensor == name:
            new.index_fill_(edit.axis, torch.tensor(edit.at), True)
    return new


def close(found: Any, true: Any) -> None:
    found, true = (torch.as_tensor(value).detach() for value in (found, true))
    torch.testing.assert_close(found, true, rtol=1e-7, atol=1e-9 * float(true.abs().max()))


def snapshot(*things: Any) -> list[Any]:
    """The contents of state dicts, bit for bit, as values that can be compared."""
    leaves = tree_flatten_with_path([thing.state_dict() for thing in things if not isinstance(thing, SimpleNamespace)])[0]
    return [(path, leaf.tolist(), leaf.dtype) if isinstance(leaf, Tensor) else (path, leaf) for path, leaf in leaves]


class Side(nn.Module):
    """Two volumes side by side along one axis, or on top of each other, then with one weight for both."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.tied = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3 if tied else 6, 2), tied
        self.b.weight = self.a.weight if tied else self.b.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x).tanh(), self.b(x + 1).tanh()
        return self.c(a + b if self.tied else torch.cat([a, b], 1))
