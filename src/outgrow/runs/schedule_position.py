"""Find the events of a schedule that a saved run has carried out, and check that the run can continue with this schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from outgrow.errors import Problem, ScheduleError
from outgrow.runs.schedule import At, Schedule, When
from outgrow.transforms.all_transforms import TABLE


def mark(event: At | When) -> str:
    """A text that identifies an event; without addresses of functions, which differ from process to process."""
    share = event.share if isinstance(event, At) else None
    time = event.time if share is None else f"share {share!r}"  # the length of a run may change while it is interrupted
    return re.sub(r" at 0x[0-9a-f]+", "", f"{time}: {event.grow!r}")


def without_defaults(text: str) -> str:
    """A mark without options that have their default values: files of earlier versions lack options that came later."""
    known = [field for kind in TABLE for field in fields(kind.request) if field.default is not MISSING]
    options = sorted({re.escape(f", {field.name}={field.default!r}") for field in known})
    return re.sub(f"(?:{'|'.join(options)})(?=[,)])", "", text)


def happened(schedule: Schedule, position: Mapping[str, Any]) -> list[int]:
    """Numbers of the events that a saved run has carried out, in the order in which it did."""
    if not isinstance(position, Mapping) or "done" not in position:
        raise ScheduleError(f"position={position!r:.60}: pass the result of run.position()")
    result: list[int] = []
    marks = [without_defaults(mark(event)) for event in schedule]
    for done in map(without_defaults, position["done"]):
        result.extend([number for number, known in enumerate(marks) if known == done and number not in result][:1])
    return result


def check_position(schedule: Schedule, position: Mapping[str, Any]) -> None:
    """Raise if the time of an event has passed, but the saved run has not carried it out."""
    done = happened(schedule, position)
    for number, event in enumerate(schedule):
        if number in done or not isinstance(event, At):
            continue
        now = position["epochs"] if event.at_step is None else position["steps"]
        if (event.at_step or event.at_epoch or 0) <= now:
            reason = "the saved run has not carried it out"
            instead = "give it a later time, or leave it out"
            if event.share is not None:
                instead = f"resume with the length that the saved run had; or {instead}"
            raise ScheduleError(
                f"event {number + 1} is past: the run is at step {position['steps']:,} after {position['epochs']} epochs",
                [Problem(repr(event), reason, instead)],
            )
