"""New units learn: a growth reports where zeros would never learn or would jump; drawn units become different."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from tests.helpers.judging import assert_same_function, shake

X = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ZERO_WRITERS = outgrow.NetMorph(zero="writers")


class Gated(nn.Module):
    """A gate and its input: one volume, written by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * F.silu(self.gate(x)))


class Two(nn.Module):
    """A volume that is read after a ReLU and, elsewhere, without it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.behind, self.last = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.behind(torch.relu(x)) + self.last(x)


class Heads(nn.Module):
    """Two heads of attention over four tokens of one value each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.first, self.last = nn.Linear(1, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x.unsqueeze(2)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


class Plain(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        bias = not any(isinstance(module, nn.BatchNorm1d) for module in between)  # the norm would subtract it again
        self.first, self.between, self.last = nn.Linear(4, 6, bias=bias), nn.Sequential(*between), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


ALIVE: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: Plain(nn.Tanh()),
    "gelu": lambda: Plain(nn.GELU()),
    "leaky": lambda: Plain(nn.LeakyReLU()),
    "sigmoid": lambda: Plain(nn.Sigmoid()),
    "nothing": Plain,
    "rms": lambda: Plain(nn.RMSNorm(6, eps=1e-6)),
    "one reader of two": Two,
}
STUCK: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "relu": (lambda: Plain(nn.ReLU()), "the slope of aten.relu at zero is zero"),
    "relu6": (lambda: Plain(nn.ReLU6()), "at zero is zero"),
    "relu behind dropout": (lambda: Plain(nn.Dropout(0.5), nn.ReLU()), "at zero is zero"),
    "batch norm": (lambda: Plain(nn.BatchNorm1d(6), nn.Tanh()), "the norm between.0 would scale the first small values"),
    "batch norm and relu": (lambda: Plain(nn.BatchNorm1d(6), nn.ReLU()), "the slope of aten.relu at zero is zero"),
    "gate": (Gated, "neither would learn"),
    "heads": (Heads, "neither would learn"),
}


def grown(model: nn.Module, method: str | outgrow.Method) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with more units, and masks of its new entries."""
    old = {name: parameter.shape for name, parameter in model.named_parameters()}
    outgrow.widen(model, X, "first", factor=2, method=method)
    masks = {}
    for name, parameter in model.named_parameters():
        if parameter.shape != old[name] and not isinstance(model, Heads):
            masks[name] = torch.ones(parameter.shape, dtype=torch.bool)
            masks[name][tuple(slice(size) for size in old[name])] = False
    return model, masks


def learned(model: nn.Module, masks: dict[str, Tensor], steps: int = 20) -> float:
    """The share of new weights that moved in training by gradients alone."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
    moved = [((parameter != before[name]) & masks[name]).sum() for name, parameter in model.named_parameters() if name in masks]
    return float(sum(moved) / sum(mask.sum() for mask in masks.values()))


@pytest.mark.parametrize("make", ALIVE.values(), ids=ALIVE)
def test_zero_writers_are_taken_where_all_of_the_new_weights_learn(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    old = shake(make().double())
    model, masks = grown(copy.deepcopy(old), ZERO_WRITERS)
    assert_same_function(old, model, [X])
    assert learned(model, masks) == 1.0


@pytest.mark.parametrize(("make", "reason"), STUCK.values(), ids=STUCK)
def test_requests_for_zero_writers_report_where_these_would_not_learn_or_would_jump(
    make: Callable[[], nn.Module], reason: str
) -> None:
    torch.manual_seed(0)
    old = shake(make().double())
    growth = outgrow.widen(copy.deepcopy(old), X, "first", factor=2, method=ZERO_WRITERS)
    assert reason in str(growth)
    assert reason not in str(outgrow.widen(old, X, "first", factor=2, method="netmorph"))


def test_a_batch_norm_does_not_wake_zeros_before_a_relu() -> None:
    torch.manual_seed(0)
    model, masks = grown(shake(Plain(nn.BatchNorm1d(6), nn.ReLU()).double()), ZERO_WRITERS)
    assert learned(model, masks) == 0.0


@pytest.mark.parametrize("method", ["netmorph", "mean", "r2r", "net2net"])
@pytest.mark.parametrize("make", [lambda: Plain(nn.ReLU()), lambda: Plain(nn.BatchNorm1d(6), nn.GELU()), Gated])
def test_new_weights_learn_by_every_method(method: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, masks = grown(shake(make().double()), method)
    assert learned(model, masks) > 0.95


def test_units_that_no_statistic_sees_are_not_all_filled_with_one_mean() -> None:
    """Read by zeros, they would get equal gradients and stay equal forever."""
    torch.manual_seed(0)
    model, masks = grown(shake(Plain(nn.Tanh()).double()), "mean")
    learned(model, masks)
    assert torch.pdist(model.first.weight[6:]).min() > 0.1
    assert torch.pdist(model.last.weight.T[6:]).min() > 0


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-6, 1e-8])
@pytest.mark.parametrize("by", [1, 2, 3])
def test_an_epsilon_in_single_precision_is_moved_along(eps: float, by: int) -> None:
    torch.manual_seed(0)
    old = shake(Plain(nn.RMSNorm(6, eps=eps)))
    model = copy.deepcopy(old)
    outgrow.widen(model, X.float(), "first", by=by, method=ZERO_WRITERS)
    assert model.between[0].eps == pytest.approx(eps * 6 / (6 + by), rel=1e-6)
    torch.testing.assert_close(model(X.float()), old(X.float()))


def test_a_gate_that_is_one_operator_is_no_trap() -> None:
    torch.manual_seed(0)
    model = Plain(nn.GLU())
    model.last = nn.Linear(3, 3)
    old = shake(model.double())
    model, masks = grown(copy.deepcopy(old), ZERO_WRITERS)
    assert_same_function(old, model, [X])
    assert learned(model, masks) == 1.0
