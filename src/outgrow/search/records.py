"""The trials of a search, read from Optuna's: slots, attempts and their outcomes.

A search of n trials has n slots. Each slot has one attempt, that is one trial of Optuna, or several if workers were killed.
What there is to do follows from the stored trials alone, so that any worker can be killed at any moment:

- A slot without attempts gets one, which waits to be taken.
- A slot whose attempts were all lost (their worker was killed) gets another.
- An attempt is carried out only if all earlier attempts of its slot were lost; otherwise it is dropped. Two workers that add an
  attempt for the same slot at the same time thus do no harm.

Optuna ends a trial only once: if the worker of a lost trial is alive after all, its result is refused and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outgrow.search.objectives import Objectives

COMPLETE, FAIL, PRUNED, RUNNING, WAITING = "COMPLETE", "FAIL", "PRUNED", "RUNNING", "WAITING"
SETTLED = ("raised", "diverged")  # outcomes of failed trials that are not tried again
UNCOUNTED = ("duplicate", "interrupted")  # outcomes that are no sign of a trial that kills its worker


@dataclass(frozen=True)
class Record:
    """One trial of a search.

    number: Optuna's. parent: the number of the trial whose model it has grown; None for the first. growth: the moves in words.
    values: of the objectives. shrunk_from: the trial that was chosen as parent before the move back to an ancestor.
    """

    number: int
    slot: int
    state: str
    parent: int | None = None
    growth: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    parameters: int = 0
    flops: int = 0
    shrunk_from: int | None = None
    outcome: str = ""
    error: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    artifact: str = ""

    @staticmethod
    def of(trial: Any) -> Record:
        """From a trial of Optuna."""
        attrs = trial.user_attrs
        return Record(
            number=trial.number,
            slot=int(attrs.get("slot", -1)),
            state=trial.state.name,
            parent=attrs.get("parent"),
            growth=tuple(attrs.get("growth", ())),
            values=tuple(trial.values or ()),
            parameters=int(attrs.get("parameters", 0)),
            flops=int(attrs.get("flops", 0)),
            shrunk_from=attrs.get("shrunk_from"),
            outcome=attrs.get("outcome", ""),
            error=attrs.get("error", ""),
            seconds=float(attrs.get("seconds", 0.0)),
            metrics=attrs.get("metrics", {}),
            artifact=attrs.get("artifact", ""),
        )

    @property
    def lost(self) -> bool:
        """Whether it ended without an outcome that counts, so that its slot is tried again."""
        return self.state == FAIL and self.outcome not in SETTLED

    def to_json(self) -> dict[str, Any]:
        """Plain data: fields that differ from their defaults, without the artifact. Metrics that are not finite are None."""
        usual = Record(self.number, self.slot, self.state)
        facts = {name: value for name, value in vars(self).items() if value != getattr(usual, name) and name != "artifact"}
        if self.metrics:  # JSON has no NaN
            facts["metrics"] = {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}
        return {"number": self.number, "slot": self.slot, "state": self.state, **facts}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Record:
        tuples = {name: tuple(facts[name]) for name in ("growth", "values") if name in facts}
        return Record(**{**facts, **tuples})


@dataclass(frozen=True)
class Book:
    """All trials of a search, sorted into slots.

    Example:
        >>> book = Book([Record(0, 0, COMPLETE), Record(1, 1, FAIL), Record(2, 2, WAITING)], slots=4, attempts=5)
        >>> book.missing(), [record.number for record in book.waiting()], book.finished
        ([1, 3], [2], False)
    """

    records: Sequence[Record]
    slots: int
    attempts: int  # lost attempts after which a slot is given up

    def of_slot(self, slot: int) -> list[Record]:
        return sorted((record for record in self.records if record.slot == slot), key=lambda record: record.number)

    def by_slot(self) -> dict[int, list[Record]]:
        found: dict[int, list[Record]] = {slot: [] for slot in range(self.slots)}
        for record in sorted(self.records, key=lambda record: record.number):
            if record.slot in found:
                found[record.slot].append(record)
        return found

    def untried(self) -> list[int]:
        """Slots that have no attempt yet."""
        return [slot for slot, tried in self.by_slot().items() if not tried]

    def missing(self) -> list[int]:
        """Slots that need an attempt: they have none, or all were lost, but not too many."""
        return [slot for slot, tried in self.by_slot().items() if all(r.lost for r in tried) and not self._given_up(tried)]

    def waiting(self) -> list[Record]:
        """Attempts that can be taken now; only the first slot until its trial is complete, since all others descend from it."""
        found = [record for record in self.records if record.state == WAITING and 0 <= record.slot < self.slots]
        rooted = any(record.slot == 0 and record.state == COMPLETE for record in self.records)
        return sorted((r for r in found if rooted or r.slot == 0), key=lambda record: (record.slot, record.number))

    def running(self) -> list[Record]:
        return [record for record in self.records if record.state == RUNNING and 0 <= record.slot < self.slots]

    def superfluous(self, record: Record) -> bool:
        """Whether an earlier attempt of the same slot was not lost."""
        return any(not other.lost for other in self.of_slot(record.slot) if other.number < record.number)

    def settled(self) -> list[Record]:
        """For each slot that is done, the attempt that counts."""
        found = []
        for tried in self.by_slot().values():
            done = [r for r in tried if r.state in (COMPLETE, PRUNED) or (r.state == FAIL and not r.lost)]
            if done or self._given_up(tried):
                found.append(max(done or tried, key=lambda record: (record.state == COMPLETE, record.number)))
        return found

    def failed_root(self) -> Record | None:
        """The first slot's trial if it is done without a result: all other trials descend from it."""
        return next((record for record in self.settled() if record.slot == 0 and record.state != COMPLETE), None)

    @property
    def finished(self) -> bool:
        return len(self.settled()) == self.slots

    def _given_up(self, tried: Iterable[Record]) -> bool:
        return sum(record.lost and record.outcome not in UNCOUNTED for record in tried) >= self.attempts


def complete(records: Iterable[Record]) -> list[Record]:
    """Trials that can be parents, by slot: the number of a trial that was taken up again depends on when it was interrupted."""
    return sorted((record for record in records if record.state == COMPLETE), key=lambda record: (record.slot, record.number))


def ancestors(record: Record, records: Iterable[Record]) -> list[Record]:
    """The parent of a trial, its parent, and so on up to the first."""
    by_number = {one.number: one for one in records}
    found: list[Record] = []
    while record.parent is not None and record.parent in by_number and len(found) <= len(by_number):
        record = by_number[record.parent]
        found.append(record)
    return found


def pareto_front(records: Iterable[Record], objectives: Objectives) -> list[Record]:
    """The complete trials that no other dominates; of trials with equal values, the first."""
    from outgrow.search.pareto import fronts

    found = list({record.values: record for record in reversed(complete(records))}.values())
    points = [objectives.losses(record.values) for record in found]
    first = fronts(points)[0] if points else []
    return sorted((found[number] for number in first), key=lambda record: objectives.losses(record.values))
