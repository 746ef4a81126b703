"""Explain the failure of a growth whose plan is outdated, because the model's code has changed since the run was made.

If a planned growth fails, it is planned again for the model as it is now. If that is refused, or gives another plan, the error
says that the plan is outdated, with the reason and the way out. If it gives the same plan, the cause is another one, and the
error stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from outgrow.distributed.fsdp import is_sharded
from outgrow.engine.dry_run_findings import Ready
from outgrow.errors import ApplyError, GrowthError, MethodError, Problem, VerifyError
from outgrow.model.example import Example
from outgrow.runs.schedule import At, Schedule, When
from outgrow.runs.timeline import timeline

CHANGED = "the model's code has changed since the run was made, so that the growth can't be carried out as planned"
MAKE_NEW_RUN = (
    "make a new run: position = run.position(); run = outgrow.Run(model, example, optimizer, schedule, …, "
    "position=position); run.go_to(position). In a trainer, resume from its last checkpoint"
)


@contextlib.contextmanager
def outdated(model: nn.Module, example: Example, event: At | When, seed: int, ready: Ready | None) -> Iterator[None]:
    """Replace the error of a growth inside the block by an explanation, if its plan is outdated."""
    try:
        yield
    except (ApplyError, VerifyError, MethodError, LookupError, AttributeError) as error:
        # a sharded model would have to be gathered by all processes, and the growth may have failed in some of them only
        if ready is None or is_sharded(model) or not ready.fits(model):
            raise
        problems = _problems(model, example, event, seed, ready)
        if not problems:
            raise
        kind = type(error) if isinstance(error, GrowthError) else ApplyError
        raise kind(f"{CHANGED}; everything was put back", problems) from error


def _problems(model: nn.Module, example: Example, event: At | When, seed: int, ready: Ready) -> list[Problem]:
    """Why the plan is outdated; empty if planning again gives the same plan."""
    try:
        now = timeline(model, example, Schedule([event]), [seed]).stages[1]
    except GrowthError as refusal:
        reason = refusal.__cause__ if isinstance(refusal.__cause__, GrowthError) else refusal
        found = f"it is not possible any more: {str(reason).splitlines()[0]}"
        return [Problem(event.time, found, f"leave it out, or change it, and {MAKE_NEW_RUN}"), *reason.problems]
    if now.ready is not None and _plans(now.ready) == _plans(ready):
        return []
    return [Problem(event.time, f"the plan would now be another: {now.sizes} by {now.method}", MAKE_NEW_RUN)]


def _plans(ready: Ready) -> list[Any]:
    return [plan.to_json() for plan in ready.plans]
