"""Arms as trees of legs: what several arms have in common is trained once.

With a constant rate before the decay, runs of different lengths share their beginning, and so do runs that differ in a growth
or in what follows it. A leg is a stretch of steps on a trunk (a start and the growths so far); its first step comes after the
growth that happens there, if one does.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from experiments.lm.arms import STABLE, Arm, Growth
from experiments.lm.gpt import Size


@dataclass(frozen=True)
class Trunk:
    """What has happened to a model: its start, its rates, and its growths with their steps.

    trained: steps of the finished run that it goes on from; 0 for a new model.
    """

    start: Size
    rate: float
    decay: float
    optimizer: str
    seed: int
    growths: tuple[tuple[int, Growth], ...] = ()
    trained: int = 0

    @property
    def finished(self) -> list[Leg]:
        """The run that it goes on from."""
        earlier = Arm("", self.start, self.trained, (), self.rate, self.decay, self.optimizer)
        first, last = stretches(earlier, self.seed)
        return [first, replace(last, kept=True)]


@dataclass(frozen=True)
class Leg:
    """Steps from `first` to `last` on a trunk. `falls`: where the rate begins to fall to zero, in the last leg of an arm.

    kept: its final state is written, although it is the last leg.
    """

    trunk: Trunk
    first: int
    last: int
    falls: int | None = None
    kept: bool = False

    @property
    def growth(self) -> Growth | None:
        """The growth before its first step."""
        grown = self.trunk.growths
        return grown[-1][1] if grown and grown[-1][0] == self.first != self.falls else None

    @property
    def origin(self) -> Trunk:
        """The trunk of the state that it starts from."""
        return self.trunk if self.growth is None else replace(self.trunk, growths=self.trunk.growths[:-1])

    @property
    def key(self) -> str:
        """Names its result."""
        return state_key(self.trunk, self.last) + ("" if self.falls is None else f"-end{self.falls}") + "-kept" * self.kept

    @property
    def needs(self) -> str | None:
        """The key of the state that it starts from; None for a new model."""
        if self.first:
            return state_key(self.origin, self.first)
        return self.trunk.finished[-1].key if self.trunk.trained else None


def state_key(trunk: Trunk, step: int) -> str:
    return hashlib.sha256(json.dumps([asdict(trunk), step]).encode()).hexdigest()[:20]


def stretches(arm: Arm, seed: int) -> list[Leg]:
    """The legs of an arm alone, from its start to its end."""
    trunk, first = Trunk(arm.start, arm.rate, arm.decay, arm.optimizer, seed, trained=arm.trained), 0
    found: list[Leg] = []
    for share, growth in arm.growths:
        at = round(share * arm.steps)
        if trunk.growths and first + (trunk.growths[-1][1].fade or 0) > at:
            raise ValueError(f"{arm.name}: the fade that begins at step {first} is not over at step {at}, where it grows again")
        if at:
            found.append(Leg(trunk, first, at))
        trunk, first = replace(trunk, growths=(*trunk.growths, (at, growth))), at
    cut = round(STABLE * arm.steps)
    if trunk.growths and first + (trunk.growths[-1][1].fade or 0) > cut:  # no state is written in the middle of a fade
        return [*found, Leg(trunk, first, arm.steps, cut)]
    return [*found, Leg(trunk, first, cut), Leg(trunk, cut, arm.steps, cut)]


def all_legs(arms: Iterable[Arm], seeds: Iterable[int]) -> dict[tuple[str, int], list[Leg]]:
    """The legs of each arm and seed, cut where another one leaves the same trunk."""
    alone = {(arm.name, seed): stretches(arm, seed) for seed in seeds for arm in arms}
    cuts: dict[Trunk, set[int]] = defaultdict(set)
    for legs in alone.values():
        for leg in legs:
            if leg.falls is None:
                cuts[leg.trunk].add(leg.last)
    return {name: [part for leg in legs for part in cut_up(leg, cuts[leg.trunk])] for name, legs in alone.items()}


def cut_up(leg: Leg, cuts: set[int]) -> list[Leg]:
    if leg.falls is not None:
        return [leg]
    places = [leg.first, *sorted(at for at in cuts if leg.first < at < leg.last), leg.last]
    return [replace(leg, first=one, last=other) for one, other in pairwise(places)]
