"""Every way a growth can be refused, as one tree under `GrowthError`.

A refusal names the place (a module path), the reason, and what to write instead. One error lists all refusals, so that a user
sees them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST = "\n  - "  # before each problem


@dataclass(frozen=True)
class Problem:
    """One reason for a refusal: where, why, and the way out."""

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
        super().__init__(FIRST.join([message, *(str(problem) for problem in self.problems)]))


class CallError(GrowthError, TypeError):
    """A call with a missing or unknown argument."""


class TraceError(GrowthError):
    """The model does not run on the example, so its operators can't be recorded."""


class ExampleError(TraceError):
    """The model's code raises an error on the example, for instance because of its type, its shape or missing arguments."""


class RuleError(TraceError):
    """A rule for an operator (`outgrow.rule`) that can't be registered, or that fails when it runs."""


class SelectionError(GrowthError):
    """A name or glob that matches nothing, or an exact name that can't grow."""


class SizeError(GrowthError):
    """A size that is not possible for this volume and method."""


class MethodError(GrowthError):
    """A method that is not exact, or not defined, for the selected volumes."""


class ApplyError(GrowthError):
    """The grown model does not run: its code relates sizes to each other in a way that outgrow can't adapt."""


class VerifyError(GrowthError):
    """The grown model ran, but its outputs differ from those before; the growth was undone."""

    volumes: tuple[str, ...] = ()  # that had grown


class OptimizerError(GrowthError):
    """An optimizer whose state can't follow the growth."""


class StaleOptimizerError(OptimizerError):
    """An optimizer that was not passed to the growth still has state with the old shapes."""


class StaleAverageError(GrowthError):
    """An averaged copy (EMA, SWA) that was not passed to the growth still has the old shapes."""


class CheckpointError(GrowthError):
    """A file that is damaged, not written by outgrow, of another version, or does not fit the model."""


class ParallelError(GrowthError):
    """Processes whose growths differ, or a wrapper around the model that does not support growth."""


class ScheduleError(GrowthError):
    """A schedule that is invalid or does not fit the run."""


class SearchError(GrowthError):
    """A search that can't begin or go on; the study is as it was, and can be continued."""


class MissingError(GrowthError, ImportError):
    """The library of an integration is not installed."""
