"""Check the arguments of a run before training starts: a long run must not end with an error that was known at the start."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from outgrow.errors import GrowthError, OptimizerError, Problem, ScheduleError
from outgrow.model.journal import Journal
from outgrow.optimizers.wrappers import unwrapped
from outgrow.runs.learning_rates import scale_rates
from outgrow.runs.schedule import Schedule, When
from outgrow.runs.triggers import TRIGGERS


def check_parts(
    optimizers: Sequence[Any], schedulers: Sequence[Any], also: Any, schedule: Schedule, sharded: bool = False
) -> None:
    """Raise if a part can't be saved, can't follow a growth, or belongs to another optimizer."""
    if not isinstance(also, Mapping):
        raise GrowthError(f"also= is of type {type(also).__name__}: write a dict of names, e.g. also={{'scaler': scaler}}")
    for name, part in (*((f"scheduler {number}", one) for number, one in enumerate(schedulers)), *also.items()):
        if not isinstance(part, torch.Generator) and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise GrowthError(
                f"{name} is of type {type(part).__name__}, which can't be saved: it has no state_dict and load_state_dict"
            )
    if sharded and any(event.new_lr is not None or event.train == "new" for event in schedule):
        reason = "updates are scaled entry by entry, and each process holds only some of the entries"
        raise GrowthError("updates of a sharded model can't be scaled", [Problem("new_lr=, train=", reason, "leave them out")])
    real = unwrapped(optimizers)
    for scheduler in schedulers:
        _check_optimizer_of(scheduler, real)
    _check_line_search(real, schedule)
    factors = [event.lr for event in schedule if event.lr is not None]
    for factor in factors:  # raises now if a scheduler can't follow
        trial = Journal()
        try:
            scale_rates(optimizers, schedulers, factor, trial)
        finally:
            trial.undo()
    if factors and not schedulers and any("initial_lr" in group for one in real for group in one.param_groups):
        warnings.warn(
            "a scheduler has set the optimizer's learning rates, and none was passed: if it sets them again, the factor lr= of "
            "a growth is lost. Pass it: outgrow.Run(…, scheduler=scheduler)",
            stacklevel=3,
        )


def check_check(check: Any) -> None:
    """Raise if `check=` has a wrong value."""
    if not (isinstance(check, bool) or (isinstance(check, str) and check == "full")):
        raise GrowthError(
            f"check={check!r}: write True (brief if the growth was planned in a dry run), 'full' (thorough) or False (none)"
        )


def _check_line_search(optimizers: Sequence[Optimizer], schedule: Schedule) -> None:
    """Raise if the updates of LBFGS would have to be scaled."""
    found = [isinstance(optimizer, LBFGS) for optimizer in optimizers]
    if any(found) and any(event.new_lr is not None or event.train == "new" for event in schedule):
        reason = "its line search stores its own steps, which can't be changed afterwards"
        raise OptimizerError("updates can't be scaled", [Problem("LBFGS", reason, "leave new_lr= and train= out")])


def _check_optimizer_of(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a scheduler sets the rates of an optimizer outside the run.

    Trainers wrap schedulers in an object with an attribute `scheduler`.
    """
    layer = scheduler
    while not hasattr(layer, "optimizer") and hasattr(layer, "scheduler"):
        layer = layer.scheduler
    theirs = getattr(layer, "optimizer", None)
    groups = getattr(theirs, "param_groups", None)
    if groups is not None and all(groups is not optimizer.param_groups for optimizer in optimizers):
        found = f"{type(scheduler).__name__} sets the rates of an optimizer outside the run, {type(theirs).__name__}"
        raise OptimizerError(f"{found}: pass that optimizer to the run too")


def as_number(name: str, value: Any) -> float:
    """A measured value as a float."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GrowthError(f"{name} is not a number: {error}") from None


def measured(metrics: Any) -> dict[str, float]:
    """The metrics of an epoch as floats by name."""
    if not isinstance(metrics, Mapping | None):
        raise ScheduleError(f"metrics must be a dict of numbers by name, not {metrics!r}: run.epoch({{'val_loss': …}})")
    return {name: as_number(f"the metric {name!r}", value) for name, value in (metrics or {}).items()}


def check_measured(triggered: Sequence[When], past: Sequence[Mapping[str, float]]) -> None:
    """Raise, in the first epoch already, if metrics are missing that a trigger reads now or later."""
    if not past[-1]:
        raise ScheduleError(f"the schedule waits for {triggered[0].time!r}: pass the metrics of the epoch, run.epoch(metrics)")
    for event in triggered[1:]:
        if type(event.rule) in TRIGGERS.values():
            event.rule(past)


def warn_lost(event: When, epoch: int) -> None:
    """Warn that a metric of an epoch was lost, because the run was resumed within that epoch."""
    named = getattr(event.rule, "metric", None) if type(event.rule) in TRIGGERS.values() else None
    metric = f"the metric that {event.time!r} reads" if named is None else repr(named)
    warnings.warn(
        f"{metric} is not known for epoch {epoch}: values that training logged in this epoch before the checkpoint are lost on "
        "resuming. The trigger skips this epoch, and the run continues; use validation metrics in triggers",
        stacklevel=2,
    )


def as_loss(value: Any) -> torch.Tensor | float:
    """A loss to keep, without synchronising with the device: a tensor stays one until its value is needed."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return as_number("the loss", value)
