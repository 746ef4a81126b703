"""Every way a growth can be refused, as one tree under `GrowthError`.

A refusal tells the place (a module path), the reason, and what to write instead; several are gathered into one error,
so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One reason why something can't be done: where, why, and the way out."""

    where: str
    reason: str
    instead: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        way_out = f"\n      instead: {self.instead}" if self.instead else ""
        return f"{place}{self.reason}{way_out}"


class GrowthError(Exception):
    """A growth was refused; model, optimizer, files and random state are exactly as before.

    Example:
        >>> raise GrowthError("nothing can grow", [Problem("fc", "its units are the model's output")])
        Traceback (most recent call last):
        ...
        outgrow.errors.GrowthError: nothing can grow
          - fc: its units are the model's output
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n  - ".join([message, *(str(problem) for problem in self.problems)]))


class CallError(GrowthError, TypeError):
    """A call without an argument that it needs, or with one that it does not have."""


class TraceError(GrowthError):
    """The model does not run on the example, so there is nothing to watch."""


class RuleError(TraceError):
    """A rule for an operator (`outgrow.rule`) that can't be registered, or that fails where it is used."""


class SelectionError(GrowthError):
    """A name or glob that matches nothing, or an exact name that can't grow."""


class SizeError(GrowthError):
    """A size that is not possible for this volume and method."""


class MethodError(GrowthError):
    """A method that is not exact (or not defined) on the selected volumes."""


class ApplyError(GrowthError):
    """The grown model does not run: its code ties sizes in a way that can't be repaired."""


class VerifyError(GrowthError):
    """The grown model ran but did not compute what the old one did; it was undone."""

    volumes: tuple[str, ...] = ()  # what had grown


class OptimizerError(GrowthError):
    """An optimizer whose state can't follow the growth."""


class StaleOptimizerError(OptimizerError):
    """An optimizer that was not passed to the growth still holds state of the old shapes."""


class CheckpointError(GrowthError):
    """A file that is damaged, foreign, of another version, or does not fit the model."""


class ParallelError(GrowthError):
    """Processes that did not grow alike, or a wrapper around the model that can't follow."""


class ScheduleError(GrowthError):
    """A schedule that makes no sense, or does not fit the run."""


class MissingError(GrowthError, ImportError):
    """A library that an integration is for is not installed."""
