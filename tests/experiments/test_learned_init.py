"""The comparison of learned with drawn values: its budgets, and the tables of the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.learned_init import LEARN_FROM, RESULTS, TASKS, Run, step_flops, table

PAGE = Path(__file__).parents[2] / "docs" / "where-to-grow.md"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_shows_the_tables_of_the_kept_results(path: Path) -> None:
    results = json.loads(path.read_text(encoding="utf-8"))
    assert table(results) in PAGE.read_text(encoding="utf-8")
    assert results["command"] == f"python -m experiments.learned_init {path.stem}"
    for arm in results["arms"].values():
        assert [int(seed) for seed in arm["seeds"]] == list(results["setting"]["seeds"])
        assert all(one["flops"] == pytest.approx(results["budget"], rel=0.02) for one in arm["seeds"].values())


def test_the_price_of_gradmax_on_the_page_is_that_of_the_results() -> None:
    results = json.loads((RESULTS / "plays.json").read_text(encoding="utf-8"))
    for name in ("r2r + gradmax", "r2r, cost of gradmax"):
        for one in results["arms"][name]["seeds"].values():
            share = sum(growth["cost"] for growth in one["growths"]) / results["budget"]
            assert f"its passes take {share:.0%} of the FLOPs" in PAGE.read_text(encoding="utf-8")


def test_arms_get_the_same_flops_and_passes_for_learning_are_part_of_them() -> None:
    task = TASKS["digits"]()
    cost = step_flops(task.small(0), task.batch(0))
    budget = 40.0 * cost
    arms = {arm.name: arm for arm in task.arms}
    drawn, learned = (Run(task, arms[name], 1e-3, 0).train(budget) for name in ("r2r", "r2r + gradmax"))
    assert drawn["parameters"] == learned["parameters"] == Run(task, arms["large"], 1e-3, 0).train(1.0)["parameters"]
    assert [growth["cost"] for growth in drawn["growths"]] == [0.0] * 3
    assert learned["growths"][0]["cost"] == pytest.approx(LEARN_FROM * cost * 4 / 3)
    assert learned["steps"] < drawn["steps"]
