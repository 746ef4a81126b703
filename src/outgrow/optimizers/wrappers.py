"""Unwrap optimizers: trainers, Lookahead and SAM hold another optimizer as an attribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from outgrow.errors import OptimizerError, Problem

NEW_ONE = "leave it out and make a new optimizer after the growth"
TRANSPARENT = frozenset({"accelerate.AcceleratedOptimizer"})  # wrappers of trainers, without state of their own
INSIDE = ("optimizer", "base_optimizer", "_base_optimizer")  # attributes under which wrappers hold another optimizer


def unwrapped(optimizers: Sequence[Any]) -> list[Optimizer]:
    """The optimizers that hold state, each once, from the outside in; of several that share a state, the innermost."""
    found: dict[int, Optimizer] = {}
    for given in optimizers:
        layers = layers_of(given)
        real = [layer for layer in layers if isinstance(layer, Optimizer)]
        if not real:
            raise OptimizerError(f"{type(given).__name__} is no optimizer: pass a torch.optim.Optimizer, or a list of them")
        if any(type(layer).__name__ == "ZeroRedundancyOptimizer" for layer in layers):
            reason = "it distributes parameters over the ranks by their sizes, and each rank holds only the state of its own"
            raise OptimizerError("an optimizer can't follow the growth", [Problem("ZeroRedundancyOptimizer", reason, NEW_ONE)])
        found.update({id(layer.state): layer for layer in real})
    return list(found.values())


def layers_of(given: Any) -> list[Any]:
    """An optimizer or wrapper, and the optimizers inside it, from the outside in."""
    layers = [given]
    while True:
        inner = next((one for name in INSIDE if (one := getattr(layers[-1], name, None)) is not None), None)
        if inner is None or any(inner is layer for layer in layers):
            return layers
        layers.append(inner)


def held_by(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]
