"""From arms to segments: what has to be trained, each piece once.

A segment is one stage of one seed, with all that comes before it; two arms that begin alike share segments. Its key is a digest
of what it depends on, so that a file of results belongs to exactly one description.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from experiments.setting.arms import Arm, Stage
from experiments.setting.models import Net


@dataclass(frozen=True)
class Segment:
    net: Net
    stages: tuple[Stage, ...]
    seed: int
    optimizer: str
    flips: bool

    @property
    def stage(self) -> Stage:
        return self.stages[-1]

    @cached_property
    def parent(self) -> Segment | None:
        """What it goes on from."""
        if len(self.stages) == 1:
            return None
        return Segment(self.net, self.stages[:-1], self.seed, self.optimizer, self.flips)

    @cached_property
    def key(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{self.seed}"

    @cached_property
    def size(self) -> tuple[str, float, float, bool]:
        """What decides the shape of its network, growths included: segments that differ here differ in shape."""
        r, blocks = self.net.r, float(self.net.blocks)
        for grow in [stage.grow for stage in self.stages if stage.grow]:
            r, blocks = (r * grow.factor, blocks) if grow.what == "widen" else (r, 2 * blocks)
        return self.net.kind, round(r, 6), blocks, self.net.residual

    @property
    def begins(self) -> float:
        """The epoch at which its stage begins, counted from the first one of all."""
        return sum(stage.epochs for stage in self.stages[:-1])


def segments_of(arm: Arm, seed: int) -> list[Segment]:
    return [Segment(arm.net, arm.stages[: end + 1], seed, arm.optimizer, arm.flips) for end in range(len(arm.stages))]


def all_segments(arms: Iterable[Arm], seeds: Sequence[int]) -> list[Segment]:
    """Each one once, parents before children."""
    return list(dict.fromkeys(segment for arm in arms for seed in seeds for segment in segments_of(arm, seed)))
