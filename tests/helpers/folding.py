"""Small residual networks with one widened volume, and all properties that a folded residual must have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import outgrow
from outgrow import Fold
from tests.helpers.judging import assert_learns, assert_same_function
from tests.helpers.random_weights import randomise

DTYPE = torch.float64


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    model = make().to(DTYPE)
    randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def images(batch: int, seed: int, size: int = 6) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


FRESH = [images(5, 1), images(2, 2, 8)]


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def changed(before: dict[str, torch.Size], model: nn.Module) -> set[str]:
    """Modules with a tensor whose shape has changed."""
    return {name.rpartition(".")[0] for name, shape in shapes(model).items() if shape != before[name]}


def fold(model: nn.Module, where: str | Sequence[str], by: int = 4, **more: object) -> set[str]:
    """Widen one volume, check all properties, and return the modules that have changed."""
    old, before = copy.deepcopy(model), shapes(model)
    parameters = [id(parameter) for parameter in model.parameters()]
    growth = outgrow.widen(model, images(3, 0), where, by=by, residual="fold", **more)  # type: ignore[arg-type]
    assert growth.max_error <= growth.tolerance
    assert list(shapes(model)) == list(before)
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert [type(module).__name__ for module in model.modules() if not isinstance(module, (Fold, nn.Identity))] == [
        type(module).__name__ for module in old.modules() if not isinstance(module, (Fold, nn.Identity))
    ]
    assert_same_function(old, model, FRESH)
    assert_learns(model, images(3, 3))
    return changed(before, model)
