"""Detect that another optimizer trains a run's model, while the run's own optimizers make no steps.

That happens if the user makes a new optimizer for the model. The run would grow the state of the old optimizer, and the new one
would not follow. Torch has a hook on the steps of all optimizers of a process, so this is detected at the next `run.step()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from outgrow.errors import OptimizerError, Problem
from outgrow.model.other_optimizers import WeakNotes, held_parameters
from outgrow.optimizers.wrappers import held_by

IF_REPLACED = (
    "if it replaces the run's optimizer, make a new run: position = run.position(); run = outgrow.Run(model, example, "
    "optimizer, schedule, …, position=position); run.go_to(position). If both train the model, pass both: "
    "outgrow.Run(model, example, [one, other], …)"
)


class _Clock:
    """Count the steps of all optimizers of the process, with weak references only.

    Torch's hook is global, so there is one clock per process.
    """

    def __init__(self) -> None:
        self.now = 0
        self.last = WeakNotes()  # the last step of each optimizer
        self.started = False

    def start(self) -> None:
        if not self.started:
            register_optimizer_step_post_hook(_after_step)
            self.started = True


_CLOCK = _Clock()


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _CLOCK.now += 1
        _CLOCK.last.put(optimizer, _CLOCK.now)


class Steps:
    """Check, from one `run.step()` to the next, which optimizers have made steps."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        _CLOCK.start()
        self.model, self.optimizers = model, optimizers
        self.seen = _CLOCK.now

    def check(self) -> None:
        """Raise if, since the last check, only optimizers outside the run have trained the run's parameters."""
        last, seen = _CLOCK.last, self.seen
        if _CLOCK.now != seen and all(last.get(optimizer, 0) <= seen for optimizer in self.optimizers):
            self._check_others([other for other, when in last if when > seen])
        self.seen = _CLOCK.now

    def _check_others(self, others: Sequence[Optimizer]) -> None:
        own = {id(parameter) for optimizer in self.optimizers for parameter in held_by(optimizer)}
        names = {id(parameter): name for name, parameter in self.model.named_parameters() if id(parameter) in own}
        for other in others:
            taken = [names[id(parameter)] for parameter in held_parameters(other) if id(parameter) in names]
            if taken:
                kind = type(self.optimizers[0]).__name__
                reason = (
                    f"it trains {taken[0]} and {len(taken) - 1} more parameters of the run's own {kind}, which makes no steps"
                )
                problem = Problem(type(other).__name__, reason, IF_REPLACED)
                raise OptimizerError("an optimizer that is not part of the run has made a step", [problem])
