"""Copies of a model and its optimizers that share nothing with them, so that a trial leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from outgrow.errors import GrowthError, OptimizerError, Problem
from outgrow.model.sandbox import tensors_of

FACTORY = "pass a function that makes one: trial(…, optimizer=lambda model: torch.optim.AdamW(model.parameters()))"


def copies_of(model: nn.Module, optimizers: Sequence[Any], gradients: bool = False) -> tuple[nn.Module, list[Any]]:
    """A copy of a model, and of optimizers with their state, which hold the copied parameters.

    gradients: with accumulated gradients, which deepcopy leaves out.
    """
    same: dict[int, Any] = {}  # copies by the identity of the original: parameters of the optimizers are those of the model
    for module in model.modules():  # deepcopy refuses tensors that are part of an autograd graph
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                same[id(value)] = value.detach().clone()
    try:
        twin = copy.deepcopy(model, same)
    except Exception as error:
        raise GrowthError(f"the model can't be copied: {type(error).__name__}: {error}") from error
    for given, copied in zip(model.parameters(), twin.parameters(), strict=True) if gradients else ():
        copied.grad = None if given.grad is None else given.grad.detach().clone()
    return twin, [_optimizer_copy(optimizer, same) for optimizer in optimizers]


def _optimizer_copy(optimizer: Any, same: dict[int, Any]) -> Any:
    """A copy of an optimizer; torch copies its state and groups only, and not the attributes that a class may add."""
    try:
        twin = copy.deepcopy(optimizer, same)
        for name, value in vars(optimizer).items():
            if name not in vars(twin) and not callable(value):  # a scheduler replaces `step` by a function of the original
                setattr(twin, name, copy.deepcopy(value, same))
    except Exception as error:
        problem = Problem(type(optimizer).__name__, f"{type(error).__name__}: {error}", FACTORY)
        raise OptimizerError("the optimizer can't be copied", [problem]) from error
    return twin


class Untouched:
    """Check that tensors of a model and its optimizers were not changed in place: torch counts such changes."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self.model, self.optimizers = model, optimizers
        self.before = self._versions()

    def check(self) -> None:
        """Raise if a tensor has changed."""
        if self._versions() != self.before:
            raise GrowthError(
                "step= has changed the model or optimizer that was given to the trial, instead of the copies: use the model "
                "and the optimizer that step gets as its arguments. The given ones are now trained further"
            )

    def _versions(self) -> list[int]:
        states = [getattr(optimizer, "state", {}) for optimizer in self.optimizers]
        kept = [value for state in states for entry in state.values() if isinstance(entry, dict) for value in entry.values()]
        tensors = [*tensors_of(self.model).values(), *(value for value in kept if isinstance(value, Tensor))]
        return [tensor._version for tensor in tensors if not tensor.is_inference()]
