"""How a search chooses the parent of a trial: one function per sampler.

All see the complete trials in the order of their slots, and draw from a generator that is seeded by the trial's slot, so that a
search in one process, or one that was interrupted and continued there, always chooses the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from outgrow.search.objectives import Objectives
from outgrow.search.pareto import ranking
from outgrow.search.records import Record


@dataclass(frozen=True)
class Choice:
    """The parent of a trial, and whether it grows; if not, it is only trained on."""

    parent: Record
    grows: bool = True


Sampler = Callable[[Sequence[Record], Objectives, int, int, Random], Choice]


def hill(done: Sequence[Record], objectives: Objectives, slot: int, population: int, random: Random) -> Choice:
    """Hill climbing as in NASH (Elsken et al., 2018), by the first objective.

    Trials come in generations of `population`. The parent of a generation is the best trial of those before it. The first trial
    of a generation trains the parent on without growth, so that a growth has to beat longer training.
    """
    first = slot - (slot - 1) % population  # the first slot of this generation
    before = [record for record in done if record.slot < first] or list(done)
    best = min(before, key=lambda record: (objectives.losses(record.values)[0], record.slot, record.number))
    return Choice(best, grows=slot != first)


def evolution(done: Sequence[Record], objectives: Objectives, slot: int, population: int, random: Random) -> Choice:
    """Evolution with several objectives: binary tournaments among the `population` best trials, as NSGA-II ranks them."""
    ranks = ranking([objectives.losses(record.values) for record in done])
    order = sorted(range(len(done)), key=lambda number: (ranks[number], number))[:population]
    pair = random.choice(order), random.choice(order)
    return Choice(done[min(pair, key=order.index)])


def random_parent(done: Sequence[Record], objectives: Objectives, slot: int, population: int, random: Random) -> Choice:
    """Any complete trial, with equal probability."""
    return Choice(random.choice(list(done)))


SAMPLERS: dict[str, Sampler] = {"evolution": evolution, "hill": hill, "random": random_parent}
