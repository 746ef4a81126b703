"""New blocks that end in an activation with σ(b) = 0 at b ≠ 0 are zero by a last bias of b; others are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import GrowthError, MethodError
from tests.helpers.judging import assert_same_function, shake, state_of

Function = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def network(last: Function, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return shake(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 3, bias=bias), Apply(last)).double())


def rows(seed: int) -> Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ZEROS: dict[str, tuple[Function, float]] = {  # with a root that is known in closed form
    "log": (torch.log, 1.0),
    "softplus − 1": (lambda x: F.softplus(x) - 1, math.log(math.e - 1)),
    "x − 1": (lambda x: x - 1, 1.0),
    "3 − 2x": (lambda x: 3 - 2 * x, 1.5),
    "cos": (torch.cos, math.pi / 2),
    "ELU + 1/2": (lambda x: F.elu(x) + 0.5, -math.log(2)),
    "exp − 200": (lambda x: x.exp() - 200, math.log(200)),
    "log − 5": (lambda x: x.log() - 5, math.exp(5)),
    "x² − 4": (lambda x: x**2 - 4, 2.0),
    "ReLU − 1, pooled": (lambda x: F.avg_pool1d(F.relu(x) - 1, 3), 1.0),
    "max-pooled, then log": (lambda x: F.max_pool1d(x, 3).log(), 1.0),
    "(x + 2)² − 4 of −eˣ": (lambda x: (2 - x.exp()) ** 2 - 4, math.log(4)),  # the root nearest to zero would need eˣ = 0
}


@pytest.mark.parametrize("name", ZEROS)
def test_the_last_bias_is_a_zero_of_the_last_activation(name: str) -> None:
    last, root = ZEROS[name]
    module = network(last)
    outgrow.zero_init(module, rows(0))
    assert torch.allclose(module[2].bias, torch.tensor(root, dtype=torch.float64), rtol=1e-9)
    assert bool((module[2].weight != 0).all())
    for training in (False, True):
        assert module.train(training)(rows(1)).abs().max() < 1e-10
    module(rows(2)).sum().backward()
    assert bool((module[2].weight.grad != 0).any())
    assert bool((module[0].weight.grad != 0).any())


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (torch.sigmoid, "aten.sigmoid, which is never zero"),
        (F.logsigmoid, "which is never zero"),
        (lambda x: F.elu(x) + 1, "aten.elu, which is never -1"),
        (F.hardsigmoid, "slope wherever it is zero is zero"),
        (torch.acos, "slope wherever it is zero is infinite"),
        (lambda x: x.exp() - 1e-4, "slope wherever it is 0.0001 is below 0.001"),
        (lambda x: (1 + x * x).log() - 0.5, "a product of two activations .*, which would have to be 0.648"),
        (torch.reciprocal, "which is never zero"),
        (lambda x: F.pad(x, (1, 1)).log1p() - 1, "constant_pad_nd"),
        (lambda x: torch.cat([x.log(), x - 2], -1), "2.bias would need two different values"),
        (lambda x: (x + 1).prod(-1), "prod"),
    ],
)
def test_an_activation_without_such_a_zero_is_refused(last: Function, reason: str) -> None:
    module = network(last)
    before = state_of(module)
    with pytest.raises(MethodError, match=reason):
        outgrow.zero_init(module, rows(0))
    assert state_of(module) == before


def test_a_last_layer_without_a_bias_is_refused() -> None:
    with pytest.raises(MethodError, match="has no bias, which would have to be 1"):
        outgrow.zero_init(network(torch.log, bias=False), rows(0))


STEPS: dict[str, Function] = {
    "softplus": F.softplus,
    "elu": F.elu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "cos": torch.cos,
    "leaky": F.leaky_relu,
    "relu": F.relu,
    "square": torch.square,
    "hardswish": F.hardswish,
}


def random_activation(seed: int) -> tuple[str, Function]:
    """A chain of one to three activations, each followed by a shift or a factor."""
    draw = random.Random(seed)
    chain = [
        (draw.choice(list(STEPS)), draw.choice([-2.0, -0.5, 0.5, 3.0]), draw.uniform(-2, 2)) for _ in range(draw.randint(1, 3))
    ]

    def function(x: Tensor) -> Tensor:
        for name, factor, shift in chain:
            x = STEPS[name](x) * factor + shift
        return x

    return str(chain), function


def steepest_root(function: Function) -> float:
    """The largest slope at a change of sign on a dense grid."""
    grid = torch.linspace(-15, 15, 300_001, dtype=torch.float64)
    values = function(grid)
    crossed = values[:-1] * values[1:] < 0
    slopes = (values[1:] - values[:-1]) / (grid[1:] - grid[:-1])
    return float(slopes[crossed].abs().max()) if bool(crossed.any()) else 0.0


def test_random_activations_are_zero_or_refused_for_want_of_a_zero() -> None:
    refused = 0
    for seed in range(60):
        name, function = random_activation(seed)
        module = network(function)
        before = state_of(module)
        try:
            outgrow.zero_init(module, rows(0))
        except GrowthError:
            refused += 1
            assert state_of(module) == before, name
            assert steepest_root(function) < 0.05, name
            continue
        assert module(rows(1)).abs().max() < 1e-9, name
        module(rows(2)).sum().backward()
        assert bool((module[2].weight.grad != 0).any()), name
    assert 10 < refused < 50


class Softened(nn.Module):
    """The branch of a block as a module of its own."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.norm(self.two(F.gelu(self.one(x))))) - 1


class Added(Softened):
    """x plus the branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def images(seed: int) -> Tensor:
    return torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("method", ["r2r", "r2r-paper"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_model_of_such_blocks_is_deepened_exactly(norm: bool, method: str) -> None:
    torch.manual_seed(0)
    model = shake(nn.Sequential(Added(norm), Added(norm), nn.Conv2d(4, 2, 1)).double()).eval()
    old = shake(nn.Sequential(Added(norm), Added(norm), nn.Conv2d(4, 2, 1)).double()).eval()
    old.load_state_dict(model.state_dict())
    outgrow.deepen(model, images(0), "0", method=method)
    assert isinstance(model[1], Added)
    assert len(model) == 4
    assert_same_function(old, model, [images(1), images(2)])


@pytest.mark.parametrize("method", ["r2r", "netmorph"])
def test_a_branch_beside_such_a_module_is_exact(method: str) -> None:
    torch.manual_seed(0)
    model = shake(nn.Sequential(Softened(False), nn.Conv2d(4, 2, 1)).double()).eval()
    old = shake(nn.Sequential(Softened(False), nn.Conv2d(4, 2, 1)).double()).eval()
    old.load_state_dict(model.state_dict())
    outgrow.branch(model, images(0), "0", method=method)
    branch = model[0].get_submodule("1")
    assert isinstance(branch, Softened)
    assert_same_function(old, model, [images(1), images(2)])
    model(images(3)).sum().backward()
    assert bool((branch.two.weight.grad != 0).all())
