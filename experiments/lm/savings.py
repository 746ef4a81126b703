"""What a grown model saves: compute and time of the large model from scratch at the same loss.

Scratch is run at several lengths, each with its rate fallen to zero. Between these the loss is interpolated linearly over the
logarithm of the cost, for each seed by itself:

    saving = 1 − cost of the arm / cost of scratch at the loss of the arm

An arm whose loss is outside of what scratch reached has no saving: nothing is extrapolated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from experiments.reading.curves import Estimate, student

COSTS = ("flops", "seconds")
SCRATCH, MUON = "scratch", "muon-"
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class End:
    """The end of a run: the loss on held-out text, and what it cost. Seconds include those of growths."""

    loss: float
    flops: float
    seconds: float

    def cost(self, axis: str) -> float:
        return float(getattr(self, axis))


@dataclass(frozen=True)
class Saving:
    """Of one arm. Shares are by seed; None stands for a loss outside of scratch's range."""

    arm: str
    losses: Mapping[int, float]
    flops: float
    shares: Mapping[str, Mapping[int, float | None]]

    @property
    def loss(self) -> float:
        return sum(self.losses.values()) / len(self.losses)

    def estimate(self, axis: str) -> Estimate | None:
        """The mean over seeds with its interval; None if a seed is outside of the range, or there is only one."""
        found = [share for share in self.shares[axis].values() if share is not None]
        return student(found) if len(found) == len(self.losses) > 1 else None

    def mean(self, axis: str) -> float | None:
        found = [share for share in self.shares[axis].values() if share is not None]
        return sum(found) / len(found) if len(found) == len(self.losses) else None


def ends(results: Results, arm: str) -> dict[int, End]:
    """The ends of all runs of an arm, by seed."""
    found = {}
    for seed, run in results[arm]["seeds"].items():
        legs = run["legs"]
        held_out = legs[-1]["held_out"]
        loss = float(held_out[str(max(map(int, held_out)))])
        flops = float(sum((leg["last"] - leg["first"]) * leg["step_flops"] for leg in legs))
        found[int(seed)] = End(loss, flops, float(sum(leg["seconds"] for leg in legs)))
    return found


def scratch_of(results: Results, arm: str) -> dict[int, list[End]]:
    """Scratch with the arm's optimizer, by seed, the cheapest first."""
    prefix = f"{MUON if arm.startswith(MUON) else ''}{SCRATCH}@"
    found: dict[int, list[End]] = {}
    for name in results:
        if name.startswith(prefix):
            for seed, end in ends(results, name).items():
                found.setdefault(seed, []).append(end)
    return {seed: sorted(line, key=lambda end: end.flops) for seed, line in found.items()}


def cost_at(line: list[End], loss: float, axis: str) -> float | None:
    """What scratch costs at a loss; None outside of its range.

    Example:
        >>> line = [End(1.0, 100.0, 1.0), End(0.8, 400.0, 4.0)]
        >>> round(cost_at(line, 0.9, "flops"), 6), cost_at(line, 0.7, "flops")
        (200.0, None)
    """
    for before, after in pairwise(line):
        if after.loss <= loss <= before.loss and after.loss < before.loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            low, high = math.log(before.cost(axis)), math.log(after.cost(axis))
            return math.exp(low + share * (high - low))
    return None


def saving_of(results: Results, arm: str) -> Saving:
    """What an arm saves against scratch with the same seeds."""
    own, lines = ends(results, arm), scratch_of(results, arm)
    shares: dict[str, dict[int, float | None]] = {axis: {} for axis in COSTS}
    for seed, end in own.items():
        for axis in COSTS:
            cost = cost_at(lines.get(seed, []), end.loss, axis)
            shares[axis][seed] = None if cost is None else 1 - end.cost(axis) / cost
    flops = sum(end.flops for end in own.values()) / len(own)
    return Saving(arm, {seed: end.loss for seed, end in own.items()}, flops, shares)


def savings(results: Results) -> list[Saving]:
    """Of all arms that grow, or that go on from a finished model."""
    return [saving_of(results, name) for name in results if not name.removeprefix(MUON).startswith(SCRATCH)]
