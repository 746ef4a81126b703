"""Which trials become parents."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from outgrow.search.objectives import Objectives
from outgrow.search.parents import SAMPLERS
from outgrow.search.pareto import dominates
from outgrow.search.records import COMPLETE, Record, complete

TWO = Objectives.of({"accuracy": "max", "parameters": "min"})
FRONT = [(0.9, 500.0), (0.7, 200.0), (0.5, 100.0)]
OTHERS = [(0.4, 450.0), (0.6, 480.0), (0.3, 300.0), (0.2, 600.0), (0.65, 490.0)]
DONE = [Record(n, n, COMPLETE, values=values) for n, values in enumerate([*OTHERS, *FRONT])]


def drawn(sampler: str, population: int, objectives: Objectives = TWO, slot: int = 9) -> Counter[tuple[float, ...]]:
    choose = SAMPLERS[sampler]
    return Counter(choose(DONE, objectives, slot, population, Random(seed)).parent.values for seed in range(300))


def test_evolution_takes_parents_from_the_best() -> None:
    losses = [(-a, p) for a, p in FRONT + OTHERS]
    best = {point for point, loss in zip(FRONT + OTHERS, losses, strict=True) if not any(dominates(o, loss) for o in losses)}
    assert best == set(FRONT)
    assert set(drawn("evolution", population=3)) == best
    more = drawn("evolution", population=8)
    assert set(more) == set(FRONT + OTHERS)
    assert min(more[point] for point in FRONT) > max(more[point] for point in [(0.2, 600.0), (0.3, 300.0)])  # tournaments


def test_one_objective_is_a_race() -> None:
    one = [Record(n, n, COMPLETE, values=(value,)) for n, value in enumerate((3.0, 1.0, 2.0))]
    chosen = {SAMPLERS["evolution"](one, Objectives.of("error"), 5, 1, Random(seed)).parent.number for seed in range(20)}
    assert chosen == {1}


def test_random_takes_all_alike() -> None:
    counts = drawn("random", population=1)
    assert set(counts) == set(FRONT + OTHERS)
    assert max(counts.values()) < 3 * min(counts.values())


@pytest.mark.parametrize(("slot", "first"), [(1, True), (2, False), (4, False), (5, True), (8, False), (9, True)])
def test_hill_climbing_comes_in_generations(slot: int, first: bool) -> None:
    choice = SAMPLERS["hill"](DONE, TWO, slot, 4, Random(0))
    assert choice.grows is not first
    begin = slot - (slot - 1) % 4
    assert choice.parent.values[0] == max(record.values[0] for record in DONE if record.slot < begin)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_trial_that_was_taken_up_again_is_chosen_as_the_one_that_was_not_interrupted(sampler: str) -> None:
    """Its number is that of its second attempt, behind all others."""
    values = [3.0, 1.0, 1.0, 2.0, 2.0]
    whole = [Record(n, n, COMPLETE, values=(value,)) for n, value in enumerate(values)]
    again = complete([Record(7 if n == 1 else n, n, COMPLETE, values=(value,)) for n, value in enumerate(values)])
    for seed in range(50):
        one, other = (SAMPLERS[sampler](d, Objectives.of("error"), 5, 4, Random(seed)).parent.slot for d in (whole, again))
        assert one == other
