"""Tables and words of the report, against the raw files: recomputed here by plain loops, without the code under test."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.figures import RESULTS
from experiments.pages.looks import look
from experiments.reading.against_paper import claims
from experiments.reading.curves import bootstrap, by_account, mean_curve, reached, road
from experiments.reading.diversity import Look, ahead, read_filters
from experiments.reading.findings import findings, lede
from experiments.reading.groups import GROUPS
from experiments.reading.result_files import file_name, read_all
from experiments.reading.tables import Numbers, numbers
from experiments.report import page
from experiments.setting.appendix_b import appendix_b_arms
from experiments.setting.arms import paper_arms
from experiments.setting.more_arms import more_arms
from tests.helpers import made_up_results as made_up

SEEDS = range(5)


def raw(arm: str) -> dict:
    return json.loads((RESULTS / file_name(arm)).read_text())


@pytest.fixture(scope="module")
def found() -> Numbers:
    return numbers(read_all(RESULTS), {})


@pytest.mark.parametrize("arm", ["NCT-R2WiderR", "FTT-RandomDeep", "BI-He", "OF-Teacher"])
def test_final_accuracy_is_the_last_entry_of_each_seed(found: Numbers, arm: str) -> None:
    content = raw(arm)
    ends = [100 * content["curves"][str(seed)][-1]["accuracy"][-1] for seed in SEEDS]
    lates = [100 * statistics.mean(content["curves"][str(seed)][-1]["accuracy"][-10:]) for seed in SEEDS]
    row = found.end(arm)
    assert row is not None
    assert (row.n, row.paper) == (5, content["arm"]["paper"])
    assert row.mean == pytest.approx(statistics.mean(ends))
    assert row.sd == pytest.approx(statistics.stdev(ends))
    assert row.late == pytest.approx(statistics.mean(lates))
    assert row.late_sd == pytest.approx(statistics.stdev(lates))
    if row.paper is not None:
        assert row.difference is not None
        assert row.difference.value == pytest.approx(statistics.mean(ends) - row.paper)


def test_an_interval_is_that_of_all_resamples() -> None:
    values = [1.0, 4.0, 2.5, 7.0, 3.0]
    means = sorted(statistics.mean(pick) for pick in itertools.product(values, repeat=5))
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    found = bootstrap(values)
    assert (found.value, found.n) == (3.5, 5)
    assert (found.low, found.high) == pytest.approx((cuts[0], cuts[-1]))
    assert found.clear
    assert not bootstrap([-1.0, 1.0, 0.5]).clear
    assert not bootstrap([3.0]).clear  # one seed settles nothing


def test_many_seeds_are_resampled_by_chance_with_a_fixed_seed() -> None:
    values = [math.sin(i) for i in range(12)]
    spread = statistics.stdev(values) / math.sqrt(12)
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * spread, rel=0.15)


def test_differences_are_taken_seed_by_seed(found: Numbers) -> None:
    one, other = raw("NCT-Net2WiderNet")["curves"], raw("NCT-RandomWide(NoResidual)")["curves"]
    gaps = [100 * (one[str(s)][-1]["accuracy"][-1] - other[str(s)][-1]["accuracy"][-1]) for s in SEEDS]
    pair = found.pair("NCT-Net2WiderNet", "NCT-RandomWide(NoResidual)")
    assert pair is not None
    assert pair.end.value == pytest.approx(statistics.mean(gaps))
    reach = 2.776 * statistics.stdev(gaps) / 5**0.5  # Student's t with four degrees of freedom
    assert (pair.end.low, pair.end.high) == pytest.approx((statistics.mean(gaps) - reach, statistics.mean(gaps) + reach))


def test_from_nothing_counts_the_teacher_and_reuse_does_not(found: Numbers) -> None:
    teacher, own = raw("NCT-WidenTeacher")["curves"]["3"][0], raw("NCT-R2WiderR")["curves"]["3"][0]
    whole = road(found.results, "NCT-R2WiderR", 3)
    rest = by_account(whole, "reuse")
    assert rest is not None
    assert whole.flops[-1] == pytest.approx(teacher["flops"][-1] + own["flops"][-1])
    assert rest.flops[-1] == pytest.approx(own["flops"][-1])
    assert whole.seconds[-1] == pytest.approx(teacher["seconds"][-1] + own["growth"]["seconds"] + own["seconds"][-1])
    assert rest.seconds[0] == pytest.approx(own["growth"]["seconds"])
    assert (whole.epochs[-1], rest.epochs[0], rest.epochs[-1]) == (500, 0, 250)
    assert list(whole.accuracy) == pytest.approx([100 * value for value in teacher["accuracy"] + own["accuracy"]])
    assert list(rest.accuracy) == pytest.approx([100 * value for value in own["accuracy"]])
    never = road(found.results, "NCT-RandomWide", 0)
    assert by_account(never, "reuse") is never


def brute_cost(pieces: list[dict], start: int, target: float) -> float:
    """FLOPs at which a seed first has an accuracy: a walk over the raw lists, from stage `start` on."""
    spent = 0.0
    for number, piece in enumerate(pieces):
        points = list(zip(piece["flops"], piece["accuracy"], strict=True))
        for place, (flops, accuracy) in enumerate(points if number >= start else []):
            if 100 * accuracy >= target:
                if place == 0:
                    return spent + flops
                before, low = points[place - 1]
                return spent + before + (target / 100 - low) / (accuracy - low) * (flops - before)
        spent += piece["flops"][-1] if number >= start else 0.0
    return math.inf


@pytest.mark.parametrize("target", [60, 65, 68, 70])
@pytest.mark.parametrize("arm", ["FTT-R2WiderR", "FTT-R2DeeperR"])
def test_costs_against_a_walk_over_the_raw_lists(found: Numbers, arm: str, target: int) -> None:
    scratch = {"FTT-R2WiderR": "FTT-RandomWide", "FTT-R2DeeperR": "FTT-RandomDeep"}[arm]
    base = [brute_cost(raw(scratch)["curves"][str(seed)], 0, target) for seed in SEEDS]
    for account, start in (("nothing", 0), ("reuse", 1)):
        costs = [brute_cost(raw(arm)["curves"][str(seed)], start, target) for seed in SEEDS]
        row = found.cost(arm, f"{target} %", account)
        assert row is not None
        assert row.reached == sum(map(math.isfinite, costs))
        assert row.median == pytest.approx(statistics.median(costs))
        both = [(a, b) for a, b in zip(costs, base, strict=True) if math.isfinite(a) and math.isfinite(b)]
        if len(both) > 1:
            assert row.saving is not None
            assert row.saving.n == len(both)
            assert row.saving.value == pytest.approx(1 - sum(a for a, _ in both) / sum(b for _, b in both))
        else:
            assert row.saving is None


def by_hand(*pieces: tuple[list[float], list[float], float]) -> dict:
    """Results of one seed: accuracies in per cent, costs, and the seconds of the growth that begins a stage."""
    curves = [
        {"accuracy": [a / 100 for a in y], "epoch": x, "flops": x, "seconds": x, "growth": {"seconds": took} if took else {}}
        for y, x, took in pieces
    ]
    stages = [{"grow": {"what": "widen"} if took else None} for *_, took in pieces]
    return {"A": {"arm": {"name": "A", "own": 0, "stages": stages}, "seeds": [0], "curves": {"0": curves}}}


def test_no_accuracy_lies_between_before_and_after_a_growth() -> None:
    fell = road(by_hand(([10, 60], [0, 5], 0), ([20, 40, 80], [0, 2, 4], 1)), "A", 0)
    assert reached(fell, "flops", 70) == pytest.approx(5 + 2 + 1.5)  # between 40 and 80, three quarters of the way
    assert reached(fell, "flops", 50) == pytest.approx(4)  # by the small network
    assert reached(fell, "seconds", 70) == pytest.approx(5 + 1 + 2 + 1.5)
    rest = by_account(fell, "reuse")
    assert rest is not None
    assert reached(rest, "flops", 15) == 0  # there from the first entry
    assert reached(rest, "flops", 90) == math.inf
    rose = road(by_hand(([10, 20], [0, 5], 0), ([60, 70], [0, 2], 1)), "A", 0)
    assert reached(rose, "seconds", 40) == 6  # when the growth is done, not in the middle of it


def test_at_the_growth(found: Numbers) -> None:
    pieces = [raw("FTT-RandPadWiden")["curves"][str(seed)] for seed in SEEDS]
    row = found.growth("FTT-RandPadWiden")
    assert row is not None
    assert row.before == pytest.approx(statistics.mean(100 * piece[0]["accuracy"][-1] for piece in pieces))
    assert row.after == pytest.approx(statistics.mean(100 * piece[1]["accuracy"][0] for piece in pieces))
    assert row.one_epoch == pytest.approx(statistics.mean(100 * piece[1]["accuracy"][1] for piece in pieces))
    assert row.worst_loss == pytest.approx(statistics.mean(max(piece[1]["steps"][1:11]) for piece in pieces))
    assert not row.preserving
    student = found.growth("NCT-R2WiderR")
    assert student is not None
    ends = [100 * raw("NCT-WidenTeacher")["curves"][str(seed)][-1]["accuracy"][-1] for seed in SEEDS]
    assert student.before == pytest.approx(statistics.mean(ends))


def test_shared_stages_are_counted_once(tmp_path: Path) -> None:
    found = numbers(read_all(made_up.write(tmp_path, seeds=2, only="BI")), {})
    # Two arms share their first stage: three stages of six epochs for each of two seeds, two of them growths.
    assert (found.work.arms, found.work.epochs, found.work.growths) == (2, 3 * 6 * 2, 4)
    assert found.work.flops == pytest.approx(2 * 6 * (1 + 2 + 2) * 1e12)
    assert found.work.seconds == {"paper": pytest.approx(2 * (3 * 0.6 + 2 * 0.05))}


def test_without_the_teacher_only_reuse_can_be_reported(found: Numbers) -> None:
    fewer = {name: content for name, content in found.results.items() if name not in ("NCT-WidenTeacher", "NCT-RandomDeep")}
    assert mean_curve(fewer, "NCT-R2WiderR", "nothing") is None
    alone, whole = mean_curve(fewer, "NCT-R2WiderR", "reuse"), mean_curve(found.results, "NCT-R2WiderR", "reuse")
    assert alone is not None
    assert whole is not None
    assert list(alone.seconds) == pytest.approx(list(whole.seconds))
    assert list(alone.flops) == list(whole.flops)
    partly = numbers(fewer, {})
    row = partly.growth("NCT-R2WiderR")
    assert row is not None
    assert row.before is None
    assert partly.cost("NCT-R2WiderR", "65 %", "nothing") is None
    assert partly.cost("NCT-R2WiderR", "65 %", "reuse") == found.cost("NCT-R2WiderR", "65 %", "reuse")


def test_diversity_and_symmetry_of_grown_filters(tmp_path: Path) -> None:
    filters = read_filters(made_up.write(tmp_path, seeds=2, only="VIZ", filters=True))
    rows = {(row.arm, row.when): row for row in numbers(read_all(tmp_path), filters).diversity}

    def cosine(one: list[float], other: list[float]) -> float:
        return abs(sum(a * b for a, b in zip(one, other, strict=True))) / math.hypot(*one) / math.hypot(*other)

    for arm in ("VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph"):
        apart, twins = [], []
        for seed in (0, 1):
            flat = [[v - sum(one) / len(one) for v in one] for one in filters[f"{arm}/{seed}/end"].reshape(32, -1).tolist()]
            alike = {(i, j): cosine(flat[i], flat[j]) for i, j in itertools.combinations(range(32), 2)}
            apart.append(1 - sum(alike.values()) / len(alike))
            twins += [max(alike[min(i, j), max(i, j)] for j in range(32) if j != i) for i in range(16, 32)]
        row = rows[arm, "end"]
        assert row.diversity == pytest.approx(statistics.mean(apart))
        assert row.symmetry == pytest.approx(statistics.mean(twins))
        assert rows[arm, "before"].symmetry is None
    assert rows["VIZ-R2R", "after"].symmetry == pytest.approx(1, abs=1e-3)  # pairs
    assert rows["VIZ-Net2Net", "after"].symmetry == pytest.approx(1, abs=1e-3)  # copies
    assert rows["VIZ-NetMorph", "after"].symmetry < 0.6  # drawn


def test_words_follow_the_values(found: Numbers) -> None:
    """Other results, other words: the same text for other numbers would be a text that was written beforehand."""
    worse = copy.deepcopy(found.results)
    for content in worse.values():
        for pieces in content["curves"].values():
            if pieces[-1]["growth"]:
                pieces[-1]["accuracy"] = [max(0.0, value - 0.2) for value in pieces[-1]["accuracy"]]
    other = numbers(worse, {})
    before, after = ({one.title: one for one in findings(each)} for each in (found, other))
    assert "The growth itself changes nothing" in before
    assert "Growths moved accuracy by up to 20.0 points" in after
    assert not [one for one in findings(other)[1:] if one.tone == "good"]
    verdicts = [{claim.paper: claim.verdict for claim in claims(each)} for each in (found, other)]
    assert verdicts[0] != verdicts[1]
    assert lede(found) == lede(other)


def test_two_seeds_settle_nothing_about_filters() -> None:
    look = Look("VIZ-R2R", "end", 5, 32, 0.9, 0.01, 0.5, 0.1)
    other = replace(look, arm="VIZ-NetMorph", diversity=0.8)
    assert ahead(look, other)
    assert not ahead(other, look)
    assert not ahead(replace(look, n=2), other)
    assert not ahead(look, replace(other, diversity_sd=0.05))


def test_every_arm_that_can_be_run_has_its_place_in_the_report(tmp_path: Path) -> None:
    arms = [*paper_arms(), *more_arms(), *appendix_b_arms()]
    placed = {name for group in GROUPS for name in (*group.arms, *group.more, *group.teachers)}
    assert {arm.name for arm in arms} <= placed
    for group in GROUPS:
        labels = [look(name).label for name in (*group.arms, *group.more)]
        assert len(labels) == len(set(labels)), group.key
    found = numbers(read_all(made_up.write(tmp_path, seeds=1, arms=arms)), {})
    made = page(found, set(), None, "")
    assert "{{" not in made
    assert "nan" not in re.sub(r"<script.*", "", made, flags=re.DOTALL)
    assert all(f'data-group="{group.key}"' in made for group in GROUPS)


@pytest.mark.parametrize(
    ("only", "seeds"), [("BI-He", 1), ("NCT-R2", 1), ("FTT", 2), ("NCT-WidenTeacher", 1), ("APB", 2), ("", 1), ("VIZ", 2)]
)
def test_a_few_arms_and_one_seed_are_enough(tmp_path: Path, only: str, seeds: int) -> None:
    found = numbers(read_all(made_up.write(tmp_path, seeds=seeds, only=only)), {})
    assert lede(found)
    words = " ".join([*(one.title + one.text for one in findings(found)), *(claim.ours for claim in claims(found))])
    assert "nan" not in words
    assert "{{" not in page(found, set(), None, "")
