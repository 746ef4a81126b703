"""Fronts and crowding against brute force, and against Optuna's own selection of the best trials."""

from __future__ import annotations

import math
import random

import pytest

from outgrow.search.objectives import Objectives
from outgrow.search.pareto import crowding, dominates, fronts, ranking
from outgrow.search.records import COMPLETE, Record, pareto_front


def points(seed: int, count: int, axes: int, kinds: int) -> list[tuple[int, ...]]:
    generator = random.Random(seed)
    return [tuple(generator.randrange(kinds) for _ in range(axes)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_fronts_are_those_of_a_brute_force_loop(seed: int) -> None:
    given = points(seed, 30, 1 + seed % 3, 4 + 3 * seed)
    left, expected = list(range(len(given))), []
    while left:
        front = [i for i in left if not any(dominates(given[j], given[i]) for j in left)]
        expected.append(front)
        left = [i for i in left if i not in front]
    assert fronts(given) == expected


@pytest.mark.parametrize("ways", [("minimize", "minimize"), ("maximize", "minimize"), ("minimize", "maximize")])
def test_the_front_of_a_search_is_that_of_optuna(ways: tuple[str, str]) -> None:
    optuna = pytest.importorskip("optuna")
    given = [(float(a), float(b)) for a, b in points(7, 40, 2, 9)]
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=list(ways))
    for values in given:
        study.add_trial(optuna.trial.create_trial(values=values))
    records = [Record(number, number, COMPLETE, values=values) for number, values in enumerate(given)]
    records.append(Record(99, 99, "FAIL"))
    found = pareto_front(records, Objectives(("a", "b"), ways))
    assert {record.values for record in found} == {tuple(trial.values) for trial in study.best_trials}
    assert len({record.values for record in found}) == len(found)


def test_the_crowding_distance_is_the_sum_of_gaps() -> None:
    assert crowding([(0, 10), (2, 6), (5, 5), (10, 0)]) == [math.inf, 0.5 + 0.5, 0.8 + 0.6, math.inf]
    assert crowding([(1, 1), (1, 1)]) == [math.inf, math.inf]
    assert crowding([]) == []


def test_the_ranking_prefers_fronts_then_distant_points() -> None:
    given = [(0, 10), (2, 6), (5, 5), (10, 0), (11, 11)]
    assert sorted(range(5), key=ranking(given).__getitem__) == [0, 3, 2, 1, 4]
