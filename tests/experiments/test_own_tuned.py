"""The comparison in which every way is tuned for itself, against plain loops over made-up and kept results."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import pays
from experiments.figures import RESULTS
from experiments.reading.comparison import Comparison, read
from experiments.reading.own_tuned import own_of, own_tables
from experiments.setting.own_tuning import line_arms
from experiments.setting.protocol import Chosen

KEPT = RESULTS.parent


@pytest.fixture(scope="module")
def kept() -> Comparison:
    found = read(KEPT)
    ours = {name: one for name, one in found.results.items() if not name.startswith("OWN-")}
    return replace(found, results=ours, own={"scratch": {8: Chosen(8e-3, 0.2)}, "widen-nothing": {8: Chosen(1.6e-2, 0.2)}})


def ends(arm: str) -> list[float]:
    content = json.loads((KEPT / "protocol" / f"{arm}.json").read_text())
    return [100 * content["curves"][str(seed)][-1]["accuracy"][-1] for seed in range(5)]


WAYS = {
    "widen-flops": ("EQ-widen-r2r-flops", (0.75, 0.77, 0.76, 0.78, 0.74)),
    "widen-repeak": ("EQ-widen-r2r-repeak", (0.70, 0.73, 0.72, 0.71, 0.69)),
    "widen-nothing-random": ("EQ-widen-random", (0.60, 0.63, 0.62, 0.65, 0.61)),
}


@pytest.fixture(scope="module")
def made(kept: Comparison) -> Comparison:
    """With results of two other schedules and of random padding, each with settings of its own, at budget 8."""
    own = {**kept.own, **{name: {8: Chosen(3.2e-2, 0.05)} for name in WAYS}}
    arms, results = line_arms(own), dict(kept.results)
    for line, scores in WAYS.values():
        arm = arms[line][8]
        curves = {str(seed): [{"accuracy": [0.1, score], "seconds": [0.0, 1.0]}] for seed, score in enumerate(scores)}
        results[arm.name] = {"arm": json.loads(json.dumps(asdict(arm))), "seeds": list(range(5)), "curves": curves}
    return replace(kept, own=own, results=results)


def test_there_is_none_before_its_runs_are_made(kept: Comparison) -> None:
    assert own_of(kept) is None
    assert len(own_tables(kept)) == 1  # r2r against random padding


def test_runs_that_are_there_already_are_part_of_it(made: Comparison) -> None:
    own = own_of(made)
    assert own is not None
    assert set(own.lines) == {"EQ-scratch", "EQ-widen-r2r", "EQ-widen-r2r-flops", "EQ-widen-r2r-repeak", "EQ-widen-random"}
    assert own.scratch.values(8) == pytest.approx(ends("EQ-scratch@8"))
    assert own.lines["EQ-widen-r2r"].values(8) == pytest.approx(ends("EQ-widen-r2r@8"))
    assert own.lines["EQ-widen-random"].values(8) == pytest.approx([100 * score for score in WAYS["widen-nothing-random"][1]])
    assert {line.name for line in made.lines.values()} == {line.name for line in read(KEPT).lines.values()}


def percentiles(differences: list[float], tail: float) -> tuple[float, float]:
    """Of the means of all 3,125 ways to draw five seeds out of five."""
    means = sorted(statistics.mean(drawn) for drawn in itertools.product(differences, repeat=5))
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def shown(text: str) -> tuple[float, float, float]:
    found = [float(number.replace("−", "-")) for number in re.findall(r"[+−]\d+\.\d", text)]
    return found[0], found[1], found[2]


def test_differences_have_bootstrap_intervals_corrected_where_a_best_one_is_named(made: Comparison) -> None:
    table = next(table for table in own_tables(made) if table.caption.endswith("itself: differences"))
    assert table.head == ("points of accuracy at budget", "8")
    rows = {row[0]: row[1] for row in table.rows}
    flops, r2r, scratch = [100 * score for score in WAYS["widen-flops"][1]], ends("EQ-widen-r2r@8"), ends("EQ-scratch@8")
    pairs = [one - other for one, other in zip(flops, r2r, strict=True)]
    value, low, high = shown(rows["r2r, cosine over FLOPs − r2r"])
    assert value == pytest.approx(statistics.mean(pairs), abs=0.051)
    assert (low, high) == pytest.approx(percentiles(pairs, 0.025), abs=0.051)
    best = rows["the best − scratch"]
    assert best.endswith("r2r, cosine over FLOPs, best of 4")
    pairs = [one - other for one, other in zip(flops, scratch, strict=True)]
    value, low, high = shown(best)
    assert value == pytest.approx(statistics.mean(pairs), abs=0.051)
    assert (low, high) == pytest.approx(percentiles(pairs, 0.025 / 4), abs=0.051)
    assert rows["random (does not preserve) − r2r"].startswith("**−")
    assert rows["r2r − scratch"].startswith("**−1.6**")


def test_what_preserving_is_worth(made: Comparison) -> None:
    table = own_tables(made)[0]
    rows = {row[0]: row[1:] for row in table.rows}
    for what, account, budgets in (("deepen", "RE", (1, 2, 4, 8, 16)), ("widen", "EQ", (2, 4, 8, 16, 32))):
        name = f"{what}ing, {'reuse' if account == 'RE' else 'from nothing'}, at the settings of r2r"
        for budget in budgets:
            ours, padded = (ends(f"{account}-{what}-{way}@{budget}") for way in ("r2r", "random"))
            pairs = [one - other for one, other in zip(ours, padded, strict=True)]
            value, low, high = shown(rows[name][table.head.index(str(budget)) - 1])
            assert value == pytest.approx(statistics.mean(pairs), abs=0.051)
            assert (low, high) == pytest.approx(percentiles(pairs, 0.025), abs=0.051)
    own = rows["widening, from nothing, each tuned for itself"]
    lead = statistics.mean(ends("EQ-widen-r2r@8")) - 100 * statistics.mean(WAYS["widen-nothing-random"][1])
    assert [shown(cell)[0] for cell in own if cell != "–"] == pytest.approx([lead], abs=0.051)


def test_the_page_says_how_they_were_tuned(made: Comparison, kept: Comparison) -> None:
    page = pays.page(made)
    assert (
        "The best rate is the lowest or highest of these for widen-flops (8); widen-repeak (8); widen-nothing-random (8)"
        in page
    )
    assert "### Widening, from nothing: final accuracy in per cent, every way tuned for itself" in page
    assert "| widen-repeak | 0.032, 0.05 |" in page
    assert "tuned for itself" not in pays.page(kept).split("### ")[0]


def test_a_page_of_a_whole_folder(made: Comparison, tmp_path: Path) -> None:
    """Read from files: choices of the tuning, and results under both kinds of names."""
    for name in ("sweep", "tuning", "protocol"):
        (tmp_path / name).mkdir()
        for path in (KEPT / name).glob("*.json"):
            (tmp_path / name / path.name).symlink_to(path)
    facts: dict[str, Any] = {"format": 1, "command": "made up", "versions": {}, "device": "none"}
    before = read(tmp_path)
    arm = line_arms(before.own)["EQ-scratch"][2]
    curves = {str(seed): [{"accuracy": [0.1, 0.6], "seconds": [0.0, 1.0]}] for seed in range(5)}
    content = {**facts, "arm": asdict(arm), "seeds": list(range(5)), "curves": curves}
    path = tmp_path / "protocol" / f"{arm.name}.json"
    path.unlink(missing_ok=True)
    path.write_text(json.dumps(content))
    own = own_of(read(tmp_path))
    assert own is not None
    assert own.scratch.values(2) == [60.0] * 5
    assert set(read(tmp_path).lines) == set(before.lines)
