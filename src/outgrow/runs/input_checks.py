"""What a run is given, looked at before training starts: a run of days must not end with what could have been told at once."""

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
from outgrow.runs.triggers import Plateau, Reached


def check_parts(
    optimizers: Sequence[Any], schedulers: Sequence[Any], also: Any, schedule: Schedule, sharded: bool = False
) -> None:
    """Raise if something can't be saved, can't follow a growth, or belongs to something else."""
    if not isinstance(also, Mapping):
        raise GrowthError(f"also= is of type {type(also).__name__}: write a dict of names, e.g. also={{'scaler': scaler}}")
    for name, part in (*((f"scheduler {number}", one) for number, one in enumerate(schedulers)), *also.items()):
        if not isinstance(part, torch.Generator) and not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise GrowthError(
                f"{name} is of type {type(part).__name__}, which has no state_dict and load_state_dict to save it by"
            )
    if sharded and any(event.new_lr is not None or event.train == "new" for event in schedule):
        reason = "updates are scaled entry by entry, and each process has some entries only"
        raise GrowthError("a sharded model learns alike everywhere", [Problem("new_lr=, train=", reason, "leave them out")])
    real = unwrapped(optimizers)
    for scheduler in schedulers:
        _check_own(scheduler, real)
    _check_line_search(real, schedule)
    factors = [event.lr for event in schedule if event.lr is not None]
    for factor in factors:  # a scheduler that can't follow says so now
        trial = Journal()
        try:
            scale_rates(optimizers, schedulers, factor, trial)
        finally:
            trial.undo()
    if factors and not schedulers and any("initial_lr" in group for one in real for group in one.param_groups):
        warnings.warn(
            "the optimizer's rates have been set by a scheduler, and none was passed: if it still sets them, it takes back "
            "what lr= does at a growth. Pass it: outgrow.Run(…, scheduler=scheduler)",
            stacklevel=3,
        )


def check_check(check: Any) -> None:
    """How outputs are compared at a growth."""
    if not (isinstance(check, bool) or (isinstance(check, str) and check == "full")):
        raise GrowthError(
            f"check={check!r}: write True (brief where a growth was rehearsed), 'full' (thorough) or False (none)"
        )


def _check_line_search(optimizers: Sequence[Optimizer], schedule: Schedule) -> None:
    """The updates of LBFGS can't be scaled."""
    found = [isinstance(optimizer, LBFGS) for optimizer in optimizers]
    if any(found) and any(event.new_lr is not None or event.train == "new" for event in schedule):
        reason = "it searches along lines and remembers its own steps, which can't be changed afterwards"
        raise OptimizerError("updates can't be scaled", [Problem("LBFGS", reason, "leave new_lr= and train= out")])


def _check_own(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    """A scheduler must set the rates of an optimizer of the run; trainers wrap theirs in one with an attribute `scheduler`."""
    layer = scheduler
    while not hasattr(layer, "optimizer") and hasattr(layer, "scheduler"):
        layer = layer.scheduler
    theirs = getattr(layer, "optimizer", None)
    groups = getattr(theirs, "param_groups", None)
    if groups is not None and all(groups is not optimizer.param_groups for optimizer in optimizers):
        whose = f"{type(scheduler).__name__} sets rates of another optimizer, {type(theirs).__name__}"
        raise OptimizerError(f"{whose}: pass the optimizers whose rates the schedulers set")


def as_number(name: str, value: Any) -> float:
    """A measured value as a number."""
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GrowthError(f"{name} is no number: {error}") from None


def measured(metrics: Any) -> dict[str, float]:
    """What an epoch measured, as numbers by name."""
    if not isinstance(metrics, Mapping | None):
        raise ScheduleError(f"metrics are a dict of numbers by name, not {metrics!r}: run.epoch({{'val_loss': …}})")
    return {name: as_number(f"the metric {name!r}", value) for name, value in (metrics or {}).items()}


def check_measured(rules: Sequence[When], past: Sequence[Mapping[str, float]]) -> None:
    """Raise if an epoch measured nothing, or not what rules will look at later: better told in the first epoch."""
    if not past[-1]:
        raise ScheduleError(f"the schedule waits for {rules[0].time!r}: call run.epoch(metrics) with what was measured")
    for event in rules[1:]:
        if isinstance(event.rule, (Plateau, Reached)):
            event.rule(past)


def warn_lost(event: When, epoch: int) -> None:
    metric = repr(event.rule.metric) if isinstance(event.rule, (Plateau, Reached)) else f"what {event.time!r} looks at"
    warnings.warn(
        f"{metric} is not known for epoch {epoch}: what was logged in training before a checkpoint within an epoch is lost "
        "when a run goes on from there. The rule skips this epoch, and the run goes on; let rules look at what validation "
        "measures",
        stacklevel=2,
    )


def as_loss(value: Any) -> torch.Tensor | float:
    """A loss to remember, which waits for no device: it is made a number only where one is needed."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    return as_number("the loss", value)
