"""A growth that was planned when its run was made, for a model whose code has been changed since.

Plans follow from what the code does. Should one fail, the growth is rehearsed once more, on the model as it is: if that is
refused, or comes out otherwise, the plan is out of date, and the error says so, with the reason and the way out. If it comes
out as planned, the fault is another, and the error stays what it is.
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

CHANGED = "the model's code does something else than when the run was made, so that what was planned then can't be carried out"
ANEW = (
    "make the run anew: position = run.position(); run = outgrow.Run(model, example, optimizer, schedule, …, "
    "position=position); run.go_to(position). In a trainer, resume from its last checkpoint"
)


@contextlib.contextmanager
def outdated(model: nn.Module, example: Example, event: At | When, seed: int, ready: Ready | None) -> Iterator[None]:
    """Explain the failure of a growth within, if that went by a plan which is out of date."""
    try:
        yield
    except (ApplyError, VerifyError, MethodError, LookupError, AttributeError) as error:
        # several processes would have to gather a sharded model, and some of them may have nothing to explain
        if ready is None or is_sharded(model) or not ready.fits(model):
            raise
        problems = _problems(model, example, event, seed, ready)
        if not problems:
            raise
        kind = type(error) if isinstance(error, GrowthError) else ApplyError
        raise kind(f"{CHANGED}; everything was put back", problems) from error


def _problems(model: nn.Module, example: Example, event: At | When, seed: int, ready: Ready) -> list[Problem]:
    """What speaks against the plan now; nothing if it would be made again."""
    try:
        now = timeline(model, example, Schedule([event]), [seed]).stages[1]
    except GrowthError as refusal:
        reason = refusal.__cause__ if isinstance(refusal.__cause__, GrowthError) else refusal
        told = f"it is not possible any more: {str(reason).splitlines()[0]}"
        return [Problem(event.time, told, f"leave it out, or change it, and {ANEW}"), *reason.problems]
    if now.ready is not None and _plans(now.ready) == _plans(ready):
        return []
    told = f"it would be done otherwise now: {now.sizes} by {now.method}"
    return [Problem(event.time, told, ANEW)]


def _plans(ready: Ready) -> list[Any]:
    return [plan.to_json() for plan in ready.plans]
