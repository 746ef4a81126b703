"""Which optimizers make steps: a run whose own stand still while another trains its model holds one that was made anew.

The run would grow the state of the old one, and leave the new one behind. Torch can tell of the steps of all optimizers of a
process, so this is noticed at the first `run.step()` after it.
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

ANEW = (
    "if it was made anew, so must the run be: position = run.position(); run = outgrow.Run(model, example, optimizer, "
    "schedule, …, position=position); run.go_to(position). If both train the model, pass both: outgrow.Run(model, example, "
    "[one, other], …)"
)


class _Clock:
    """Counts the steps of all optimizers. Torch's hook is one for the process, so there is nobody to hand this over; it holds
    nothing alive."""

    def __init__(self) -> None:
        self.now = 0
        self.last = WeakNotes()  # step of each optimizer
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
    """Looks, from one `run.step()` to the next, whose steps were made."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        _CLOCK.start()
        self.model, self.optimizers = model, optimizers
        self.seen = _CLOCK.now

    def look(self) -> None:
        """Raise if, since the last look, another optimizer has trained what the run's own hold, and none of these."""
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
                    f"it trains {taken[0]} and {len(taken) - 1} more parameters of the run's own {kind}, which stands still"
                )
                problem = Problem(type(other).__name__, reason, ANEW)
                raise OptimizerError("an optimizer that the run does not know has made a step", [problem])
