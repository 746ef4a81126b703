"""The result of a trial: losses, parameters and FLOPs of each candidate, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from outgrow.text.plurals import counted
from outgrow.text.tables import plain_table, rounded

WIDTH = 128
CONTROL = "not grown"


@dataclass(frozen=True)
class Candidate:
    """A candidate of a trial: what was grown, its size, and its training losses, one per step.

    first: the loss of the first batch, before any update: that at the growth. loss: the mean over the second half of the steps.
    refused: the reason, if the growth is impossible; there are no losses then. preserving: whether the method is exact.
    """

    name: str
    what: str = ""
    parameters: int = 0
    flops: int = 0
    losses: tuple[float, ...] = ()
    preserving: bool = True
    note: str = ""
    refused: str = ""

    @property
    def first(self) -> float:
        return self.losses[0] if self.losses else float("nan")

    @property
    def loss(self) -> float:
        half = self.losses[len(self.losses) // 2 :]
        return sum(half) / len(half) if half else float("nan")


@dataclass(frozen=True, repr=False)
class Trial:
    """The result of `outgrow.trial`. `print(trial)` shows it as a table, the lowest loss first.

    control: the model without growth. candidates: in the order in which they were given.

    Example:
        >>> small = Candidate(CONTROL, "", 10, 100, (1.0, 0.9))
        >>> result = Trial(2, small, (Candidate("wider", "Widen '*' × 2", 20, 220, (1.0, 0.8)),))
        >>> result.best, round(result.gain("wider"), 3), result.efficient
        ('wider', 0.1, ('wider', 'not grown'))
    """

    steps: int
    control: Candidate
    candidates: tuple[Candidate, ...]

    def __getitem__(self, name: str) -> Candidate:
        for candidate in (self.control, *self.candidates):
            if candidate.name == name:
                return candidate
        raise KeyError(f"{name!r}: the trial has {', '.join(candidate.name for candidate in self.candidates)}")

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The trained models, without refused ones, by their loss; a diverged one last."""
        trained = [one for one in (self.control, *self.candidates) if not one.refused]
        return tuple(sorted(trained, key=lambda one: (not isfinite(one.loss), one.loss)))

    @property
    def best(self) -> str | None:
        """The name of the candidate with the lowest loss; None if all were refused or have diverged."""
        found = [one.name for one in self.ranked if one is not self.control and isfinite(one.loss)]
        return found[0] if found else None

    @property
    def efficient(self) -> tuple[str, ...]:
        """Names of trained models for which no other one has both a lower loss and as few FLOPs, by their loss."""
        found: list[Candidate] = []
        for one in self.ranked:
            if isfinite(one.loss) and all(one.flops < other.flops for other in found):
                found.append(one)
        return tuple(one.name for one in found)

    def gain(self, name: str) -> float:
        """By how much the loss of a candidate is lower than that of the model without growth."""
        return self.control.loss - self[name].loss

    def __str__(self) -> str:
        half = counted(self.steps - self.steps // 2, "step")
        header = ("candidate", "parameters", "FLOPs", "loss at first", f"loss, last {half}", "lower than without", "note")
        rows = [self._row(one) for one in self.ranked]
        lines = [plain_table(header, rows, WIDTH)]
        refused = [one for one in self.candidates if one.refused]
        lines += [f"refused: {one.name}: {one.refused}" for one in refused]
        return "\n".join(lines)

    __repr__ = __str__

    def _row(self, one: Candidate) -> tuple[str, ...]:
        control = one is self.control
        notes = [] if one.preserving else ["not exact"]
        notes += [one.note] if one.note else []
        notes += ["efficient"] if one.name in self.efficient else []
        return (
            one.name,
            rounded(one.parameters) + _times(self.control.parameters, one.parameters, control),
            rounded(one.flops) + _times(self.control.flops, one.flops, control),
            f"{one.first:.4f}",
            f"{one.loss:.4f}",
            "–" if control else f"{self.gain(one.name):+.4f}",
            ", ".join(notes),
        )

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON values; NaN and infinity become None."""
        best = {"steps": self.steps, "best": self.best, "efficient": list(self.efficient)}
        everyone = [_plain(one) for one in (self.control, *self.candidates)]
        data: dict[str, Any] = json.loads(json.dumps({**best, "control": everyone[0], "candidates": everyone[1:]}))
        return data


def _plain(one: Candidate) -> dict[str, Any]:
    values = asdict(replace(one, losses=()))
    losses = [_number(loss) for loss in one.losses]
    return {**values, "losses": losses, "first": _number(one.first), "loss": _number(one.loss)}


def _number(value: float) -> float | None:
    return value if isfinite(value) else None


def _times(before: int, after: int, control: bool) -> str:
    return "" if control or not before else f" (× {after / before:.2f})"


def unique_names(names: Sequence[str]) -> list[str]:
    """Names without repetitions: a second one gets a number.

    Example:
        >>> unique_names(["wide", "deep", "wide"])
        ['wide', 'deep', 'wide (2)']
    """
    return [name if name not in names[:at] else f"{name} ({names[: at + 1].count(name)})" for at, name in enumerate(names)]
