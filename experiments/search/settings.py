"""The size of the experiment, and what it is expected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FACTOR = 1.27  # by which a move multiplies the FLOPs of an image: the mean of searches that always prefer the larger network
SPEEDS = 50e12, 100e12  # FLOP/s that small convolutions in bfloat16 may reach on one H200


@dataclass(frozen=True)
class Setting:
    """first: epochs of the parent; each: of a trial; last: of the final training. children: trials of a generation."""

    trials: int
    children: int
    first: int
    each: int
    last: int
    width: int
    held_out: int
    parameters: int
    moves: int = 2


SETTINGS = {"h200": Setting(33, 8, 10, 5, 80, 32, 5_000, 8_000_000), "tiny": Setting(3, 2, 1, 1, 2, 4, 200, 20_000)}


def expected(setting: Setting, parent: float, searched: int, trained: int) -> Mapping[str, float]:
    """FLOPs that each arm spends by itself, before anything is known of the search.

    parent: FLOPs of the parent's training on an image. searched, trained: images of an epoch in trials, and at the end.
    """
    generations = [1 + (slot - 1) // setting.children for slot in range(1, setting.trials)]
    trials = [FACTOR ** (setting.moves * (generation - 0.5)) for generation in generations]
    search = parent * searched * (setting.first + setting.each * sum(trials))
    last = parent * FACTOR ** (setting.moves * max(generations, default=0)) * trained * setting.last
    return {"growth": search + last, "fresh": search + last, "scratch": search + last}


def in_words(flops: float) -> str:
    """FLOPs, and the minutes that they take.

    Example:
        >>> in_words(3e16)
        '30 PFLOP, 5 to 10 minutes'
    """
    slow, fast = (flops / speed / 60 for speed in SPEEDS)
    return f"{flops / 1e15:.3g} PFLOP, {fast:.2g} to {slow:.2g} minutes"
