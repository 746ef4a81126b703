"""The honest comparison (see `protocol`) in numbers: accuracy by budget, what an accuracy costs, and the sweep.

A *line* is one way to the big network, or a rival of it, at all budgets: every entry is the end of a whole run, with its rate
decayed. Budgets are in epochs of the big network. What an accuracy costs is read off between two budgets on a logarithmic
scale; under *reuse* the small network itself costs nothing, so that an accuracy that it has is there at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.reading.curves import Estimate, Results, bootstrap, student
from experiments.reading.result_files import ResultsError, read_all
from experiments.reading.tables import saved
from experiments.setting import own_tuning
from experiments.setting.protocol import BIG, DECAYS, GRID, RATES, SWEEP, Tuned, account_of, chosen_from, cost, tuning_name
from experiments.training.train_segments import BATCH

EPOCH = 50_000 // BATCH  # steps
SCRATCH = "EQ-scratch"
ACCOUNTS = {"EQ": "from nothing", "RE": "reuse"}


@dataclass(frozen=True)
class Line:
    """`ends`: for each budget, the final accuracy in per cent by seed; `start`: under reuse, that at the growth."""

    name: str
    ends: dict[float, dict[int, float]]
    start: dict[int, float] | None = None

    @property
    def account(self) -> str:
        return self.name.split("-")[0]

    @property
    def way(self) -> str:
        """EQ-widen-r2r-0.1 → r2r-0.1"""
        return self.name.split("-", 2)[-1]

    @property
    def seeds(self) -> list[int]:
        """Those that every budget has."""
        return sorted(set.intersection(*(set(ends) for ends in self.ends.values())))

    def values(self, budget: float) -> list[float]:
        return list(self.ends[budget].values())

    def mean(self, budget: float) -> float:
        return float(np.mean(self.values(budget)))


def lines(results: Results) -> dict[str, Line]:
    found: dict[str, Line] = {}
    for name, content in sorted(results.items(), key=lambda item: float(item[0].split("@")[1])):
        title, budget = name.split("@")
        one = found.setdefault(title, Line(title, {}, {} if title.startswith("RE") else None))
        stages = {seed: content["curves"][str(seed)] for seed in content["seeds"]}
        one.ends[float(budget)] = {seed: 100 * own[-1]["accuracy"][-1] for seed, own in stages.items()}
        if one.start is not None:
            one.start.update({seed: 100 * own[0]["accuracy"][0] for seed, own in stages.items()})
    if SCRATCH not in found:
        raise ResultsError(f"the results lack {SCRATCH}@…, with which all others are compared: run --set protocol whole")
    return dict(sorted(found.items()))


def flops(budget: float) -> float:
    return budget * EPOCH * BATCH * cost(BIG)


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Estimate | None:
    """The mean difference over the seeds that both have."""
    shared = sorted(set(one) & set(other))
    return student([one[seed] - other[seed] for seed in shared]) if shared else None


def gap(one: Line, other: Line, budget: float) -> Estimate | None:
    """How much better a line is than another at a budget, seed by seed."""
    if budget not in one.ends or budget not in other.ends:
        return None
    return paired(one.ends[budget], other.ends[budget])


def gain(line: Line, small: Line, budget: float) -> Estimate | None:
    """How much better a line ends than the small network was that is reused; `small` is that one, trained on."""
    return None if small.start is None or budget not in line.ends else paired(line.ends[budget], small.start)


def needed(line: Line, target: float) -> dict[int, float]:
    """The budget at which each seed has an accuracy: infinity if it never has, the smallest one if that is enough."""
    budgets, found = list(line.ends), {}
    for seed in line.seeds:
        y = [line.ends[budget][seed] for budget in budgets]
        first = next((place for place, value in enumerate(y) if value >= target), None)
        if line.start is not None and line.start[seed] >= target:
            found[seed] = 0.0
        elif not first:
            found[seed] = math.inf if first is None else budgets[0]
        else:
            share = (target - y[first - 1]) / (y[first] - y[first - 1])
            found[seed] = budgets[first - 1] * (budgets[first] / budgets[first - 1]) ** share
    return found


@dataclass(frozen=True)
class Need:
    """What an accuracy costs by a line, and how much less that is than from scratch, where all seeds of both have it."""

    line: str
    target: float
    budget: float  # the mean over seeds where all have it, else the median
    reached: int
    at_once: int  # of these: the small network has it
    at_most: int  # of these: the smallest budget was enough, so that less may be
    n: int
    saving: Estimate | None


def need(line: Line, scratch: Line, target: float) -> Need:
    mine, theirs = needed(line, target), needed(scratch, target)
    shared = sorted(set(mine) & set(theirs))
    saving = None
    if len(shared) > 1 and line is not scratch and all(math.isfinite(mine[seed] + theirs[seed]) for seed in shared):
        saving = bootstrap([mine[seed] for seed in shared], [theirs[seed] for seed in shared], statistic=saved)
    costs, least = list(mine.values()), min(line.ends)
    reached, at_once, at_most = (
        sum(map(test, costs)) for test in (math.isfinite, lambda cost: cost == 0, lambda cost: cost == least)
    )
    budget = float(np.mean(costs) if reached == len(costs) else np.median(costs))
    return Need(line.name, target, budget, reached, at_once, at_most, len(costs), saving)


@dataclass(frozen=True)
class Swept:
    """One thing changed at the growth: the end, and its difference from the run in which nothing is, seed by seed."""

    what: str
    account: str
    setting: str
    value: float | str
    mean: float
    difference: Estimate | None  # None for the plain run


PLAIN = {"rate": 1.0, "decay": 1.0, "scale": 1.0, "state": "kept", "new_rate": 1.0}


def sweep(results: Results) -> list[Swept]:
    rows = []
    for what in ("widen", "deepen"):
        for account in ("nothing", "reuse"):
            for setting, values in SWEEP.items():
                ends = {
                    value: {seed: 100 * content["curves"][str(seed)][-1]["accuracy"][-1] for seed in content["seeds"]}
                    for value in values
                    if (content := results.get(f"SWEEP-{what}-{account}-{setting}-{value}"))
                }
                plain = ends.get(PLAIN[setting])
                for value, mine in ends.items():
                    difference = paired(mine, plain) if plain is not None and value != PLAIN[setting] else None
                    rows.append(Swept(what, account, setting, value, float(np.mean(list(mine.values()))), difference))
    return rows


@dataclass(frozen=True)
class Comparison:
    """All of it."""

    lines: dict[str, Line]
    swept: list[Swept]
    tuned: Tuned
    results: Results
    tuned_with: tuple[int, int]  # seeds, at least and at most
    commands: int  # by how many all of it was made
    remarks: tuple[str, ...] = ()  # what those who made the results have to say of them
    own: own_tuning.Own = field(default_factory=dict)  # what was chosen where every way is tuned for itself

    @property
    def scratch(self) -> Line:
        return self.lines[SCRATCH]

    def small(self, account: str, what: str) -> Line | None:
        """The small network alone; under reuse, trained on."""
        return self.lines.get(f"{account}-small-{what}")

    def of(self, account: str, what: str) -> list[Line]:
        """The lines of an account for "widen", "deepen" or "both"."""
        return [line for line in self.lines.values() if line.name.startswith(f"{account}-{what}-")]

    def targets(self) -> dict[str, float]:
        """Accuracies that were fixed beforehand, and those at which the big network from scratch ends."""
        ends = {f"scratch at {budget:g}": self.scratch.mean(budget) for budget in self.scratch.ends if budget >= 8}
        return {"70 %": 70.0, **ends}


@dataclass(frozen=True)
class Best:
    """The best of some ways at a budget, and how far it is from a rival."""

    line: Line
    gap: Estimate
    tried: int

    @property
    def clear(self) -> bool:
        """At 5 %: to be above by chance the best of several has several chances, to be below none more than any of them."""
        return self.gap.p * (self.tried if self.gap.value > 0 else 1) < 0.05


def against(compared: Comparison, account: str, what: str, way: str = "") -> dict[str, dict[float, Best]]:
    """The best way at each budget, or the one that is named, against scratch and against the small network alone."""
    rivals = {"scratch": compared.scratch, "alone": compared.small(account, what)}
    found: dict[str, dict[float, Best]] = {rival: {} for rival in rivals}
    for budget in compared.scratch.ends:
        lines = [line for line in compared.of(account, what) if budget in line.ends and line.way == (way or line.way)]
        if lines:
            line = max(lines, key=lambda line: line.mean(budget))
            for rival, other in rivals.items():
                if other is not None and (one := gap(line, other, budget)):
                    found[rival][budget] = Best(line, one, len(lines))
    return found


def wins(found: Mapping[float, Best]) -> list[float]:
    return [budget for budget, one in found.items() if one.clear and one.gap.value > 0]


def read(folder: Path) -> Comparison:
    """From a folder with the results of the three sets: protocol, sweep and tuning; and, if it is there, remarks.txt."""
    protocol, tuning, swept = (read_all(folder / name) for name in ("protocol", "tuning", "sweep"))
    seeds = [len(tuning[name]["seeds"]) for one in GRID if (name := tuning_name(*one)) in tuning]
    contents = (*protocol.values(), *tuning.values(), *swept.values())
    commands = {command for content in contents for command in content["command"].split("; ")}
    remarks = folder / "remarks.txt"
    return Comparison(
        lines({name: content for name, content in protocol.items() if not name.startswith(own_tuning.PREFIX)}),
        sweep(swept),
        chosen_from(tuning, folder / "tuning"),
        protocol,
        (min(seeds), max(seeds)),
        len(commands),
        tuple(remarks.read_text(encoding="utf-8").splitlines()) if remarks.exists() else (),
        own_tuning.chosen(tuning),
    )


def at_the_edge(tuned: Tuned, setting: str) -> list[str]:
    """Kinds of runs whose best "rate" or "decay" lies at the end of the grid, so that a better one may lie beyond: at 1, 2."""
    found = []
    for kind, own in tuned.items():
        grid = RATES[account_of(kind)] if setting == "rate" else DECAYS
        ends = [f"{budget:g}" for budget, chosen in own.items() if getattr(chosen, setting) in (grid[0], grid[-1])]
        found += [f"{kind} ({', '.join(ends)})"] if ends else []
    return found
