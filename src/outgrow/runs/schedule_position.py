"""Which events of a schedule have happened in a run that was saved, and whether the run can go on by this schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outgrow.errors import Problem, ScheduleError
from outgrow.runs.schedule import At, Schedule, When


def mark(event: At | When) -> str:
    """What tells one event from another; addresses of functions are not the same in another process."""
    return re.sub(r" at 0x[0-9a-f]+", "", f"{event.time}: {event.grow!r}")


def happened(schedule: Schedule, position: Mapping[str, Any]) -> list[int]:
    """Events of a schedule, by number, that have happened in a saved run, in that order."""
    if not isinstance(position, Mapping) or "done" not in position:
        raise ScheduleError(f"the position of a run is what run.position() returns, not {position!r:.60}")
    result: list[int] = []
    for done in position["done"]:
        same = (number for number, event in enumerate(schedule) if mark(event) == done and number not in result)
        result.extend(list(same)[:1])
    return result


def check_position(schedule: Schedule, position: Mapping[str, Any]) -> None:
    """An event that has not happened and whose time is past can't be meant."""
    done = happened(schedule, position)
    for number, event in enumerate(schedule):
        if number in done or not isinstance(event, At):
            continue
        now = position["epochs"] if event.step is None else position["steps"]
        if (event.step or event.epoch or 0) <= now:
            reason = "it has not happened in the run that was saved"
            raise ScheduleError(
                f"event {number + 1} is past: the run is at step {position['steps']:,} after {position['epochs']} epochs",
                [Problem(repr(event), reason, "give it a later time, or leave it out")],
            )
