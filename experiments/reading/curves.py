"""From result files to curves: one road per seed, from its first step on, and the costs that are read off it.

A result file counts each stage from its own beginning, and an arm with `own` > 0 leaves its teacher's stages to the teacher's
file. Here they are put together again. Costs are given in two accounts, always both:

    from nothing   everything since the first step of the small network
    reuse          the small network is there already: from the growth on

For networks that never grow the two are the same. The seconds of a growth (its check included) count; its FLOPs, a few passes
over eight images, are not measured and do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Results = dict[str, dict[str, Any]]
Array = np.ndarray[Any, np.dtype[np.float64]]

AXES = ("epochs", "flops", "seconds")
ACCOUNTS = ("nothing", "reuse")


@dataclass(frozen=True)
class Road:
    """One seed of an arm. Accuracy is in per cent; `cuts` are the entries with which its stages begin.

    `grown` is the entry just after the last growth, None if there is none. `whole` is False where the teacher's results are not
    there, so that the road begins with the growth.
    """

    epochs: Array
    flops: Array
    seconds: Array
    accuracy: Array
    cuts: tuple[int, ...]
    grown: int | None
    whole: bool = True

    def x(self, axis: str) -> Array:
        return getattr(self, axis)  # type: ignore[no-any-return]


def road(results: Results, name: str, seed: int, measure: str = "accuracy") -> Road:
    """All that a seed of an arm went through, its teacher's stages first where their results are there.

    `measure`: "accuracy" on the test set, "validation_accuracy", or "running_accuracy" on the training batches. An arm that
    continues its teacher's training without a growth counts from there as a grown one does.
    """
    content = results[name]
    arm = content["arm"]
    own = list(content["curves"][str(seed)])
    teacher = teacher_of(results, name) if arm["own"] else None
    before = list(results[teacher]["curves"].get(str(seed), [])) if teacher else []
    whole = len(before) == arm["own"]
    stages = arm["stages"] if whole else arm["stages"][arm["own"] :]
    pieces: dict[str, list[Array]] = {"epochs": [], "flops": [], "seconds": [], "accuracy": []}
    at, cuts, grown, length = dict.fromkeys(AXES, 0.0), [], None, 0
    first = arm["own"] if whole else 0
    for place, (stage, curve) in enumerate(zip(stages, (before if whole else []) + own, strict=True)):
        at["seconds"] += curve["growth"].get("seconds", 0.0)
        for axis, key in (("epochs", "epoch"), ("flops", "flops"), ("seconds", "seconds")):
            pieces[axis].append(np.array(curve[key]) + at[axis])
            at[axis] = float(pieces[axis][-1][-1])
        pieces["accuracy"].append(100 * measured(curve[measure]))
        cuts.append(length)
        grown = length if stage["grow"] or (arm["own"] and place == first) else grown
        length += len(curve["epoch"])
    return Road(**{key: np.concatenate(parts) for key, parts in pieces.items()}, cuts=tuple(cuts), grown=grown, whole=whole)


def measured(values: Sequence[float | None]) -> Array:
    """Values of a curve; the entry before the first step has the value behind it where none was measured."""
    known = [value for value in values if value is not None]
    return np.array([known[0] if value is None else value for value in values])


def has(results: Results, name: str, measure: str) -> bool:
    """Whether an arm and its teacher have a measure in all seeds."""
    names = [name, *([teacher_of(results, name)] if results[name]["arm"]["own"] else [])]
    return all(
        one is not None and any(value is not None for value in stage.get(measure) or [])
        for one in names
        for stages in (results[one]["curves"].values() if one else [[{}]])
        for stage in stages
    )


def teacher_of(results: Results, name: str) -> str | None:
    """The arm that is this one's teacher: the same network and stages, without those after."""
    arm = results[name]["arm"]
    alike = ("net", "optimizer", "flips")
    for other in sorted(results):
        one = results[other]["arm"]
        if one["own"] == 0 and one["stages"] == arm["stages"][: arm["own"]] and all(one[key] == arm[key] for key in alike):
            return other
    return None


def roads(results: Results, name: str, measure: str = "accuracy") -> list[Road]:
    return [road(results, name, seed, measure) for seed in results[name]["seeds"]]


def by_account(one: Road, account: str) -> Road | None:
    """The road as an account counts it; None where the teacher's results are not there."""
    if account == "nothing":
        return one if one.whole else None
    if one.grown is None:
        return one
    start = one.grown
    base = {axis: float(one.x(axis)[start - 1]) if start else 0.0 for axis in AXES}
    rest = {axis: one.x(axis)[start:] - base[axis] for axis in AXES}
    cuts = tuple(cut - start for cut in one.cuts if cut >= start)
    return Road(**rest, accuracy=one.accuracy[start:], cuts=cuts, grown=0)


@dataclass(frozen=True)
class Mean:
    """The mean of an arm's seeds at each entry, and their standard deviation (0 for one seed)."""

    epochs: Array
    flops: Array
    seconds: Array
    accuracy: Array
    spread: Array
    cuts: tuple[int, ...]
    grown: int | None
    n: int

    def x(self, axis: str) -> Array:
        return getattr(self, axis)  # type: ignore[no-any-return]


def mean_curve(results: Results, name: str, account: str = "nothing", measure: str = "accuracy") -> Mean | None:
    """None where the results of the account are not there."""
    seen = [by_account(one, account) for one in roads(results, name, measure)]
    ways = [one for one in seen if one is not None]
    if len(ways) < len(seen):
        return None
    columns = {axis: np.mean([one.x(axis) for one in ways], axis=0) for axis in AXES}
    accuracy = np.array([one.accuracy for one in ways])
    spread = accuracy.std(axis=0, ddof=1) if len(ways) > 1 else np.zeros(accuracy.shape[1])
    return Mean(**columns, accuracy=accuracy.mean(axis=0), spread=spread, cuts=ways[0].cuts, grown=ways[0].grown, n=len(ways))


def reached(one: Road, axis: str, target: float) -> float:
    """The cost at which a road first has an accuracy, on straight lines between entries; infinity if it never does.

    A line is not drawn over a growth: what an inexact one destroys at a stroke has not been passed through.
    """
    x, y = one.x(axis), one.accuracy
    above = np.flatnonzero(y >= target)
    if not len(above):
        return math.inf
    first = int(above[0])
    if first in one.cuts:
        return float(x[first])
    share = (target - y[first - 1]) / (y[first] - y[first - 1])
    return float(x[first - 1] + share * (x[first] - x[first - 1]))


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; n seeds. `p`: how likely one as far from zero is by chance, where that is known."""

    value: float
    low: float
    high: float
    n: int
    p: float = math.nan

    @property
    def clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.n > 1 and (self.low > 0 or self.high < 0)


# Student's t for 95 %, by degrees of freedom
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(values: Sequence[float]) -> Estimate:
    """A mean with its 95 % interval by Student's t, which does not flatter few seeds."""
    n, mean = len(values), float(np.mean(values))
    if n < 2:
        return Estimate(mean, mean, mean, n)
    times = STUDENT[n - 2] if n - 2 < len(STUDENT) else 1.96
    error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - times * error, mean + times * error, n, chance(mean, error, n))


def chance(mean: float, error: float, n: int) -> float:
    """The two-sided p of Student's t: with t = √ν·tan α its density is that of cos^(ν−1) α."""
    if not error:
        return float(mean == 0)
    angle = math.atan(abs(mean) / error / math.sqrt(n - 1))

    def below(end: float) -> float:
        density = np.cos(np.linspace(0, end, 2001)) ** (n - 2)
        return end * float(np.mean((density[1:] + density[:-1]) / 2))

    return 1 - below(angle) / below(math.pi / 2)


def bootstrap(*samples: Sequence[float], statistic: Any = np.mean, level: float = 0.95) -> Estimate:
    """A statistic of seeds with its percentile interval over resampled seeds; several samples are resampled together.

    Up to six seeds all resamples are enumerated, so that no chance is in it; beyond, ten thousand are drawn with a fixed seed.
    With five seeds such an interval is narrower than it should be: read it as the least that is uncertain.
    """
    columns = np.array(samples, dtype=float)
    n = columns.shape[1]
    if n <= 6:
        picks = np.array(list(itertools.product(range(n), repeat=n)))
    else:
        picks = np.random.default_rng(0).integers(0, n, (10_000, n))
    values = statistic(*columns[:, picks], axis=-1)
    low, high = np.percentile(values, [50 - 50 * level, 50 + 50 * level])
    return Estimate(float(statistic(*columns, axis=-1)), float(low), float(high), n)
