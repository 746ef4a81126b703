"""Schedules: the growths of a run, as data.

An *event* is a growth with its time, its transforms, and the settings of the optimizer after it. `At` is an event at a step, an
epoch or a share of the run, `When` one at a time that a trigger decides. The same schedule can be written in Python, TOML or
JSON (see `runs/schedule_files.py`), and printed with all sizes before the run starts (see `runs/timeline.py`).

A share becomes a step or an epoch when the length of the run is known: `Schedule.over` sets it, and a run sets its own.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from outgrow.errors import ScheduleError
from outgrow.runs.triggers import Trigger
from outgrow.text.plurals import counted
from outgrow.transforms.all_transforms import Transform, described, kind_of
from outgrow.wrong_arguments import usage


@dataclass(frozen=True, kw_only=True)
class Event:
    """A growth in a run, and the settings of training after it; use `At` or `When`.

    grow: transforms, carried out as one growth. lr, weight_decay: factors for all learning rates and weight decays from then
    on. warmup: the number of steps over which learning rates rise from zero. new_lr: a factor for the new entries only.
    train: "new" holds all earlier entries, for `hold` steps, or until the next growth. state: "fresh" resets the optimizer's
    state; "copy" also gives the parameters of new blocks that are copies the state of their originals.
    """

    grow: Sequence[Transform]
    lr: float | None = None
    weight_decay: float | None = None
    warmup: int | None = None
    new_lr: float | None = None
    train: str = "all"
    hold: int | None = None
    state: str = "carry"

    def __post_init__(self) -> None:
        grow = self.grow if kind_of(self.grow) is None else (self.grow,)
        if not isinstance(grow, Sequence) or isinstance(grow, str) or not grow:
            raise ScheduleError(f"grow={self.grow!r}: write a list of transforms, e.g. [outgrow.Widen('*', factor=1.5)]")
        others = [one for one in grow if kind_of(one) is None]
        if others:
            raise ScheduleError(f"grow: {others[0]!r} is not a transform: write e.g. outgrow.Widen('*', factor=1.5)")
        object.__setattr__(self, "grow", tuple(grow))
        for name, least in (("lr", 0.0), ("weight_decay", -1.0), ("new_lr", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
            if value is not None and not (number and value > least and value >= 0):
                raise ScheduleError(f"{name}={value!r}: write a factor, e.g. {name}=0.2; leave it out to change nothing")
        for name in ("warmup", "hold"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ScheduleError(f"{name}={value!r}: write a number of steps, an integer above 0")
        if self.train not in ("all", "new"):
            raise ScheduleError(f"train={self.train!r}: write 'all', or 'new' to hold the earlier entries")
        if self.hold is not None and self.train != "new":
            raise ScheduleError("hold= is the number of steps for which train='new' holds the earlier entries: add train='new'")
        if self.state not in ("carry", "copy", "fresh"):
            raise ScheduleError(
                f"state={self.state!r}: write 'carry' (keep the optimizer's state), 'copy' (also copy it to copies of blocks) "
                "or 'fresh' (reset it)"
            )


@dataclass(frozen=True)
class Length:
    """The length of a run: a number of steps (unit "step") or of epochs."""

    unit: str
    amount: int


@usage("outgrow.At(epoch=25, grow=[outgrow.Widen('*', factor=1.5)])")
@dataclass(frozen=True, kw_only=True)
class At(Event):
    """A growth after a number of optimizer steps or epochs, or after a share of the run (`share=0.4`: 40 % of it).

    A share needs the length of the run: `outgrow.Run(…, steps=2000)`, or that of the trainer.

    Example:
        >>> from outgrow import Widen
        >>> At(epoch=25, grow=[Widen("*", factor=1.5)], lr=1 / 5)
        At(epoch 25: Widen '*' × 1.5; lr × 0.2)
        >>> At(share=0.4, grow=[Widen("*", factor=1.5)])
        At(40 % of the run: Widen '*' × 1.5)
    """

    step: int | None = None
    epoch: int | None = None
    share: float | None = None
    length: Length | None = field(default=None, init=False, repr=False, compare=False)  # of the run; see `Schedule.over`

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(value is not None for value in (self.step, self.epoch, self.share)) != 1:
            raise ScheduleError("write exactly one of step=, epoch= and share=, e.g. outgrow.At(epoch=25, grow=[…])")
        for name in ("step", "epoch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ScheduleError(f"{name}={value!r}: write a number of {name}s, an integer above 0")
        number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if self.share is not None and not (number and 0 < self.share < 1):
            raise ScheduleError(f"share={self.share!r}: write a share of the run between 0 and 1, e.g. share=0.4")

    @property
    def at_step(self) -> int | None:
        """The step; of a share, if the length of the run is known in steps."""
        return self.step if self.share is None else self._moment("step")

    @property
    def at_epoch(self) -> int | None:
        """The epoch; of a share, if the length of the run is known in epochs."""
        return self.epoch if self.share is None else self._moment("epoch")

    def _moment(self, unit: str) -> int | None:
        """The step or epoch of a share, rounded; neither the start nor the end of the run."""
        if self.share is None or self.length is None or self.length.unit != unit:
            return None
        return min(max(round(self.share * self.length.amount), 1), self.length.amount - 1)

    @property
    def time(self) -> str:
        moments = [f"{unit} {at}" for unit, at in (("step", self.at_step), ("epoch", self.at_epoch)) if at is not None]
        if self.share is None:
            return moments[0]
        share = f"{100 * self.share:.4g} % of the run"
        return f"{moments[0]} ({share})" if moments else share

    def __repr__(self) -> str:
        return f"At({self.time}: {summary(self)})"


@usage("outgrow.When(outgrow.plateau('val_loss'), grow=[outgrow.Widen('*', factor=1.5)])")
@dataclass(frozen=True, kw_only=True, init=False)
class When(Event):
    """A growth as soon as a trigger, a function of the metrics, returns True; at most once.

    Example:
        >>> from outgrow import Deepen, plateau
        >>> When(plateau("val_loss"), grow=[Deepen(after="layer3.1")])
        When(val_loss has not improved for 3 epochs: Deepen after 'layer3.1' + 1)
    """

    rule: Trigger = field(kw_only=False)

    def __init__(self, rule: Trigger, **options: Any) -> None:
        if not callable(rule):
            raise ScheduleError(f"{rule!r} is not a trigger: write e.g. outgrow.plateau('val_loss', patience=3)")
        object.__setattr__(self, "rule", rule)
        known = {name: each.default for name, each in Event.__dataclass_fields__.items() if name != "grow"}
        unknown = [name for name in options if name != "grow" and name not in known]
        if unknown or "grow" not in options:
            raise ScheduleError(
                f"When has no option {unknown[0]!r}" if unknown else "When needs grow=: When(trigger, grow=[…])"
            )
        for name, value in {**known, **options}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @property
    def time(self) -> str:
        return (
            str(self.rule) if type(self.rule).__module__.startswith("outgrow.") else getattr(self.rule, "__name__", "a trigger")
        )

    def __repr__(self) -> str:
        return f"When({self.time}: {summary(self)})"


def summary(event: Event) -> str:
    """The transforms and settings of an event, in one line."""
    parts = [", ".join(map(described, event.grow))]
    parts += [f"{name} × {value:g}" for name in ("lr", "weight_decay", "new_lr") if (value := getattr(event, name)) is not None]
    if event.warmup is not None:
        parts.append(f"warm-up over {counted(event.warmup, 'step')}")
    if event.train == "new":
        parts.append(
            "only new units learn " + (f"for {counted(event.hold, 'step')}" if event.hold else "until the next growth")
        )
    if event.state != "carry":
        parts.append("the optimizer's state is " + ("reset" if event.state == "fresh" else "copied with blocks"))
    return "; ".join(parts)


@usage("outgrow.Schedule([outgrow.At(epoch=25, grow=[outgrow.Widen('*', factor=1.5)])])")
@dataclass(frozen=True)
class Schedule:
    """Events, in their order in time.

    Example:
        >>> from outgrow import Deepen, Widen
        >>> schedule = Schedule([At(step=10, grow=[Widen("*", factor=1.5)]), At(step=20, grow=[Deepen(after="1")], lr=0.5)])
        >>> len(schedule)
        2
        >>> print(schedule)
        step 10: Widen '*' × 1.5
        step 20: Deepen after '1' + 1; lr × 0.5
    """

    events: Sequence[At | When] = ()

    def __post_init__(self) -> None:
        if isinstance(self.events, (At, When)):
            object.__setattr__(self, "events", (self.events,))
        if not isinstance(self.events, Sequence) or isinstance(self.events, str):
            raise ScheduleError(f"a schedule is a list of outgrow.At(…) and outgrow.When(…), not {self.events!r}")
        others = [event for event in self.events if not isinstance(event, (At, When))]
        if others:
            raise ScheduleError(
                f"{others[0]!r} is not an event: write outgrow.At(epoch=25, grow=[…]) or outgrow.When(trigger, grow=[…])"
            )
        object.__setattr__(self, "events", tuple(self.events))
        for name in ("at_step", "at_epoch", "share"):
            moments = [getattr(event, name) for event in self.events if isinstance(event, At)]
            times = [moment for moment in moments if moment is not None]
            if times != sorted(times):
                raise ScheduleError(
                    f"events are not in order of time ({name.removeprefix('at_')} {times}): sort them, since names in an event "
                    "refer to the model after the events before it"
                )

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[At | When]:
        return iter(self.events)

    def __str__(self) -> str:
        return "\n".join(f"{event.time}: {summary(event)}" for event in self.events)

    @usage("schedule.over(steps=2000)")
    def over(self, *, steps: int | None = None, epochs: int | None = None) -> Schedule:
        """The schedule for a run of this length, in optimizer steps or epochs, which decides when events at shares happen.

        A moment is rounded to a step (or epoch); it is neither the start nor the end of the run.

        Example:
            >>> from outgrow import Deepen
            >>> print(Schedule([At(share=0.4, grow=[Deepen(layers=6)])]).over(steps=2000))
            step 800 (40 % of the run): Deepen to 6 layers
        """
        if (steps is None) == (epochs is None):
            raise ScheduleError("the length of a run: write either steps= or epochs=, e.g. steps=2000")
        unit, amount = ("step", steps) if epochs is None else ("epoch", epochs)
        if type(amount) is not int or amount < 2:
            raise ScheduleError(f"{unit}s={amount!r}: write the length of the run, a number of {unit}s above 1")
        return Schedule([_placed(event, Length(unit, amount)) for event in self.events])

    @property
    def has_shares(self) -> bool:
        """Whether an event is at a share of the run."""
        return any(isinstance(event, At) and event.share is not None for event in self.events)

    @classmethod
    @usage("outgrow.Schedule.from_file('schedule.toml')")
    def from_file(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a schedule from a .toml or .json file; `outgrow.runs.schedule_files` describes the format."""
        from outgrow.runs import schedule_files as text

        return text.read(path)

    @usage("schedule.to_file('schedule.toml')")
    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule to a .toml or .json file."""
        from outgrow.runs import schedule_files as text

        text.write(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule from plain data, as returned by `to_dict`."""
        from outgrow.runs import schedule_files as text

        return text.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The schedule as plain data: dicts, lists, strings and numbers.

        Example:
            >>> from outgrow import Widen
            >>> Schedule([At(epoch=25, grow=[Widen("*", factor=1.5)])]).to_dict()
            {'growth': [{'epoch': 25, 'grow': [{'widen': '*', 'factor': 1.5}]}]}
        """
        from outgrow.runs import schedule_files as text

        return text.to_dict(self)


def _placed(event: At | When, length: Length) -> At | When:
    if not isinstance(event, At) or event.share is None:
        return event
    placed = copy.copy(event)
    object.__setattr__(placed, "length", length)
    return placed


def schedule_of(given: Any) -> Schedule:
    """A schedule from a schedule, its events, or the path of a file."""
    if isinstance(given, (str, os.PathLike)):
        return Schedule.from_file(given)
    return given if isinstance(given, Schedule) else Schedule(given)


def _warn_of_late(schedule: Schedule, steps: int | None, epochs: int | None) -> None:
    """Warn of growths behind the end of the run, or that would still fade in there: it was probably planned longer."""
    for event in schedule:
        if not isinstance(event, At):
            continue
        for unit, at, end in (("step", event.at_step, steps), ("epoch", event.at_epoch, epochs)):
            if at is not None and end is not None and at > end:
                warnings.warn(f"{event!r} will not happen: the run ends at {unit} {end}", stacklevel=4)
        fade = max((getattr(transform, "fade", None) or 0 for transform in event.grow), default=0)
        if event.at_step is not None and steps is not None and event.at_step <= steps < event.at_step + fade:
            warnings.warn(
                f"{event!r} would still fade in at the end of the run: it grows at step {event.at_step} of {steps}, "
                f"and fade={fade}. Write a shorter fade=, or make the schedule for {steps} steps",
                stacklevel=4,
            )


def placed_schedule(given: Any, steps: int | None, epochs: int | None, write: str = "") -> Schedule:
    """A schedule for a run of this length; raises if an event is at a share of a run of unknown length.

    write: what the user can write to say the length.
    """
    schedule = schedule_of(given)
    if steps is not None or epochs is not None:
        placed = schedule.over(steps=steps, epochs=epochs)
        _warn_of_late(placed, steps, epochs)
        return placed
    unplaced = [event for event in schedule if isinstance(event, At) and event.share is not None and event.length is None]
    if unplaced:
        write = write or "write outgrow.Run(…, steps=N), the number of optimizer steps of the whole run, or epochs=N"
        raise ScheduleError(f"the length of the run is not known, and {unplaced[0]!r} is at a share of it: {write}")
    return schedule
