"""How often the loss after a growth names the best way: against counting by hand, and against what pages say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import early_choice
from experiments.early_choice import STEPS, TRIAL, all_groups, groups_of, groups_of_lm, judged, rank_correlation

ROOT = Path(__file__).parents[2]


def arm(method: str, losses: list[float], end: float, rate: float = 0.1) -> dict[str, Any]:
    stage = {"epochs": 3, "rate": rate, "grow": None}
    grow = {"what": "widen", "method": method}
    growth = {"parameters": [10, 20]}
    curves = [{"steps": [], "accuracy": [0.1]}, {"steps": losses, "accuracy": [0.1, end], "growth": growth}]
    described = {
        "net": {"kind": "net"},
        "stages": [stage, {**stage, "grow": grow}],
        "own": 0,
        "optimizer": "adamw",
        "flips": True,
    }
    return {"arm": {**described, "name": method, "own": 0}, "curves": {"0": curves}}


def test_groups_differ_in_the_way_of_the_growth_alone() -> None:
    early = [[3.0] * 50 + [late] * 50 for late in (1.0, 2.0, 3.0, 0.5)]
    results = {f"X-{name}@1": arm(name, losses, end) for name, losses, end in zip("abc", early, (0.5, 0.7, 0.6), strict=False)}
    results["X-d@1"] = arm("d", early[3], 0.9, rate=0.2)  # another rate
    results["X-e@1"] = arm("e", early[0][:50], 0.9)  # too few steps
    (group,) = groups_of("protocol", results)
    assert group.name == "X-*@1 (a, b, c)"
    found = judged(group.cases, TRIAL)
    assert found["cases"] == 1
    assert found["hits"] == 0  # the lowest loss has a; the best in the end is b
    assert found["chance"] == pytest.approx(1 / 3)
    assert found["lost"] == pytest.approx(0.2)
    assert found["lost_blindly"] == pytest.approx(0.1)
    assert found["order"] == pytest.approx(-0.5)
    assert judged(group.cases, "at the growth")["order"] == 0


def test_language_models_from_the_first_growth_on() -> None:
    def content(how: str, level: float, end: float) -> dict[str, Any]:
        growth = {"layers": 4, "widen": [], "how": how}
        described = {"start": {}, "steps": 300, "rate": 1, "decay": 0, "optimizer": "adamw", "growths": [[0.5, growth]]}
        legs = [
            {"first": 0, "last": 150, "train": [9.0] * 15, "held_out": {"150": 9.0}, "growth": None},
            {"first": 150, "last": 195, "train": [3.0] * 5, "held_out": {}, "growth": {"exact": True}},
            {"first": 195, "last": 300, "train": [level] * 11, "held_out": {"300": end}, "growth": None},
        ]
        return {"arm": {**described, "name": how}, "seeds": {"0": {"legs": legs}}}

    results = {how: content(how, level, end) for how, level, end in (("a", 1.0, 0.8), ("b", 2.0, 0.9), ("c", 3.0, 1.0))}
    (group,) = groups_of_lm("lm/small", results)
    (case,) = group.cases
    assert len(case["b"].losses) == STEPS
    assert case["b"].losses[44:46] == (3.0, 2.0)
    found = judged(group.cases, TRIAL)
    assert (found["hits"], round(found["order"], 6)) == (1, 1.0)


def test_rank_correlations_are_those_of_numpy() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        one, other = generator.permutation(6), generator.permutation(6)
        assert rank_correlation(list(one), list(other)) == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "experiments" / "results" / early_choice.FACTS).read_text(encoding="utf-8"))
    return found


def test_the_page_and_the_figures_are_made_from_the_results(tmp_path: Path, kept: dict[str, Any]) -> None:
    early_choice.main(["--out", str(tmp_path / "page.md"), "--facts", str(tmp_path / "facts.json")])
    assert json.loads((tmp_path / "facts.json").read_text(encoding="utf-8")) == kept
    page = (ROOT / "docs" / "results" / "early-choice.md").read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page, "`python -m experiments.early_choice` writes it again"


def test_a_case_counted_by_hand(kept: dict[str, Any]) -> None:
    """Widening after a quarter of a budget of 8 epochs."""
    hits = 0
    files = {way: f"EQ-widen-{way}@8.json" for way in ("copies", "net2net", "netmorph", "r2r", "random")}
    folder = ROOT / "experiments" / "results" / "protocol"
    curves = {way: json.loads((folder / name).read_text())["curves"] for way, name in files.items()}
    for seed in "01234":
        losses = {way: sum(runs[seed][1]["steps"][50:100]) for way, runs in curves.items()}
        ends = {way: runs[seed][1]["accuracy"][-1] for way, runs in curves.items()}
        hits += ends[min(losses, key=losses.__getitem__)] == max(ends.values())
    assert kept["groups"]["EQ-widen-*@8 (copies, net2net, netmorph, r2r, random)"][TRIAL]["hits"] == hits


def test_what_is_said_of_it(kept: dict[str, Any]) -> None:
    """In docs/recipes.md and in the docstring of `outgrow.trial`."""
    text = " ".join((ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").split())
    found = kept["folders"]["protocol"][TRIAL]
    assert f"in {found['hits']:.0f} of {found['cases']} cases, and a blind choice in {found['chance']:.0f}" in text
    paper = kept["folders"]["table"][TRIAL]
    assert f"{paper['hits']:.0f} of {paper['cases']} (blindly {paper['chance']:.0f})" in text
    short = kept["groups"]["EQ-widen-*@8 (copies, net2net, netmorph, r2r, random)"][TRIAL]
    assert f"in {short['hits']:.0f} of {short['cases']}" in text
    scale = kept["folders"]["sweep"][TRIAL]
    assert f"the scale of new weights in {scale['hits']:.0f} of {scale['cases']}" in text
    assert found["hits"] <= found["chance"] + 1  # "no more often than chance"
    assert {group.folder for group in all_groups(ROOT / "experiments" / "results")} >= {"protocol", "sweep", "table"}
