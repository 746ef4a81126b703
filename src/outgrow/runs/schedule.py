"""When a run grows, and how: a schedule is data.

An *event* is a growth and what goes with it: when, which transforms, and how the optimizer goes on. `At` is one at a step or an
epoch, `When` one that a rule on the metrics decides about. The same schedule can be written in Python, TOML or JSON (see
`runs/schedule_files.py`), and shown with all its sizes before the run starts (see `runs/timeline.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from outgrow.errors import ScheduleError
from outgrow.runs.triggers import Trigger
from outgrow.transforms.all_transforms import Transform, described, kind_of
from outgrow.wrong_arguments import usage


@dataclass(frozen=True, kw_only=True)
class Event:
    """A growth in a run, and how training goes on from it; use `At` or `When`.

    grow: transforms, carried out as one. lr, weight_decay: factors for all learning rates and weight decays from then on.
    warmup: over how many steps learning rates rise again from nothing. new_lr: a factor for what is new alone. train: "new"
    holds all that was there before, for `hold` steps, or until the next growth. state: "fresh" makes the optimizer forget.
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
        strangers = [one for one in grow if kind_of(one) is None]
        if strangers:
            raise ScheduleError(f"grow: {strangers[0]!r} is no transform: write e.g. outgrow.Widen('*', factor=1.5)")
        object.__setattr__(self, "grow", tuple(grow))
        for name, least in (("lr", 0.0), ("weight_decay", -1.0), ("new_lr", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
            if value is not None and not (number and value > least and value >= 0):
                raise ScheduleError(f"{name}={value!r}: write a factor, e.g. {name}=0.2; leave it out to change nothing")
        for name in ("warmup", "hold"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ScheduleError(f"{name}={value!r}: write over how many steps, a whole number above 0")
        if self.train not in ("all", "new"):
            raise ScheduleError(f"train={self.train!r}: write 'all', or 'new' to hold what was there before")
        if self.hold is not None and self.train != "new":
            raise ScheduleError("hold= says for how many steps train='new' holds what was there before: write that too")
        if self.state not in ("carry", "fresh"):
            raise ScheduleError(f"state={self.state!r}: write 'carry' (the optimizer remembers) or 'fresh' (it starts anew)")


@usage("outgrow.At(epoch=25, grow=[outgrow.Widen('*', factor=1.5)])")
@dataclass(frozen=True, kw_only=True)
class At(Event):
    """A growth once so many optimizer steps, or epochs, are done.

    Example:
        >>> from outgrow import Widen
        >>> At(epoch=25, grow=[Widen("*", factor=1.5)], lr=1 / 5)
        At(epoch 25: Widen '*' × 1.5; lr × 0.2)
    """

    step: int | None = None
    epoch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.step is None) == (self.epoch is None):
            raise ScheduleError("say when with exactly one of step= and epoch=, e.g. outgrow.At(epoch=25, grow=[…])")
        for name in ("step", "epoch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ScheduleError(f"{name}={value!r}: write after how many {name}s, a whole number above 0")

    @property
    def time(self) -> str:
        return f"step {self.step}" if self.epoch is None else f"epoch {self.epoch}"

    def __repr__(self) -> str:
        return f"At({self.time}: {told(self)})"


@usage("outgrow.When(outgrow.plateau('val_loss'), grow=[outgrow.Widen('*', factor=1.5)])")
@dataclass(frozen=True, kw_only=True, init=False)
class When(Event):
    """A growth once a rule on the metrics says so; at most once.

    Example:
        >>> from outgrow import Deepen, plateau
        >>> When(plateau("val_loss"), grow=[Deepen(after="layer3.1")])
        When(val_loss has not improved for 3 epochs: Deepen after 'layer3.1' + 1)
    """

    rule: Trigger = field(kw_only=False)

    def __init__(self, rule: Trigger, **options: Any) -> None:
        if not callable(rule):
            raise ScheduleError(f"{rule!r} is no rule: write e.g. outgrow.plateau('val_loss', patience=3)")
        object.__setattr__(self, "rule", rule)
        known = {name: each.default for name, each in Event.__dataclass_fields__.items() if name != "grow"}
        strange = [name for name in options if name != "grow" and name not in known]
        if strange or "grow" not in options:
            raise ScheduleError(f"When has no option {strange[0]!r}" if strange else "When(rule, grow=[…]): say what to grow")
        for name, value in {**known, **options}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @property
    def time(self) -> str:
        return str(self.rule) if type(self.rule).__module__.startswith("outgrow.") else getattr(self.rule, "__name__", "a rule")

    def __repr__(self) -> str:
        return f"When({self.time}: {told(self)})"


def told(event: Event) -> str:
    """What an event does, in a few words."""
    parts = [", ".join(map(described, event.grow))]
    parts += [f"{name} × {value:g}" for name in ("lr", "weight_decay", "new_lr") if (value := getattr(event, name)) is not None]
    if event.warmup is not None:
        parts.append(f"warm-up over {event.warmup} steps")
    if event.train == "new":
        parts.append("new units alone learn " + (f"for {event.hold} steps" if event.hold else "until the next growth"))
    if event.state == "fresh":
        parts.append("the optimizer starts anew")
    return "; ".join(parts)


@usage("outgrow.Schedule([outgrow.At(epoch=25, grow=[outgrow.Widen('*', factor=1.5)])])")
@dataclass(frozen=True)
class Schedule:
    """Events, in the order in which they are meant to come.

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
        strangers = [event for event in self.events if not isinstance(event, (At, When))]
        if strangers:
            raise ScheduleError(
                f"{strangers[0]!r} is no event: write outgrow.At(epoch=25, grow=[…]) or outgrow.When(rule, grow=[…])"
            )
        object.__setattr__(self, "events", tuple(self.events))
        for name in ("step", "epoch"):
            times = [
                getattr(event, name) for event in self.events if isinstance(event, At) and getattr(event, name) is not None
            ]
            if times != sorted(times):
                raise ScheduleError(
                    f"events go back in time: {name} {times} should be in order, since names are those of the model then"
                )

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[At | When]:
        return iter(self.events)

    def __str__(self) -> str:
        return "\n".join(f"{event.time}: {told(event)}" for event in self.events)

    @classmethod
    @usage("outgrow.Schedule.from_file('schedule.toml')")
    def from_file(cls, path: str | os.PathLike[str]) -> Schedule:
        """The schedule in a .toml or .json file; see `outgrow.runs.schedule_files` for what is written there."""
        from outgrow.runs import schedule_files as text

        return text.read(path)

    @usage("schedule.to_file('schedule.toml')")
    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write it to a .toml or .json file."""
        from outgrow.runs import schedule_files as text

        text.write(self, path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """The schedule that plain data tells, as `to_dict` writes it."""
        from outgrow.runs import schedule_files as text

        return text.from_dict(data)

    def to_dict(self) -> dict[str, Any]:
        """The schedule as plain data: dicts, lists, words and numbers.

        Example:
            >>> from outgrow import Widen
            >>> Schedule([At(epoch=25, grow=[Widen("*", factor=1.5)])]).to_dict()
            {'growth': [{'epoch': 25, 'grow': [{'widen': '*', 'factor': 1.5}]}]}
        """
        from outgrow.runs import schedule_files as text

        return text.to_dict(self)
