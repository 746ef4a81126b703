"""The honest comparison's numbers, against the raw files by plain loops; and its page, which says what the files say."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pytest

from experiments import pays
from experiments.figures import RESULTS
from experiments.pages import budgets
from experiments.reading.answers import holm, remaining, saving_elsewhere
from experiments.reading.comparison import Best, Comparison, Line, Swept, against, flops, gain, gap, lines, need, needed, read
from experiments.reading.curves import Estimate, student
from experiments.reading.own_tuned import fairest, own_of
from experiments.reading.result_files import ResultsError, read_all
from experiments.setting import own_tuning
from experiments.setting.flops import step_flops
from experiments.setting.models import Net

KEPT = RESULTS.parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return read(KEPT)


def ends(arm: str, folder: str = "protocol") -> list[float]:
    content = json.loads((KEPT / folder / f"{arm}.json").read_text())
    return [100 * content["curves"][str(seed)][-1]["accuracy"][-1] for seed in range(5)]


def test_lines_are_the_ends_of_runs(compared: Comparison) -> None:
    for name, budget in (("EQ-scratch", 16), ("EQ-widen-r2r-0.1", 4), ("RE-deepen-fade", 2), ("EQ-both-widen-first", 32)):
        assert compared.lines[name].values(budget) == pytest.approx(ends(f"{name}@{budget}"))
    pairs = zip(ends("EQ-deepen-r2r@2"), ends("EQ-scratch@2"), strict=True)
    found = gap(compared.lines["EQ-deepen-r2r"], compared.scratch, 2)
    assert found is not None
    assert found.value == pytest.approx(statistics.mean(a - b for a, b in pairs))
    assert gap(compared.lines["RE-deepen-r2r"], compared.scratch, 3) is None


def test_a_budget_is_what_it_costs(compared: Comparison) -> None:
    """The FLOPs in the files are those of so many epochs of the big network, whatever way was taken."""
    epoch = 390 * 128 * step_flops(Net(r=1 / 4).build(0))[0]
    assert flops(1) == pytest.approx(epoch)
    for name, content in compared.results.items():
        spent = sum(stage["flops"][-1] for stage in content["curves"]["0"])
        assert spent == pytest.approx(float(name.split("@")[1]) * epoch, rel=2e-3), name


def test_what_an_accuracy_costs() -> None:
    ends = {2: (60.0, 71.0, 50.0, 60.0), 8: (80.0, 72.0, 60.0, 69.0), 32: (81.0, 73.0, 69.0, 75.0)}
    line = Line("EQ-widen-r2r", {budget: dict(enumerate(values)) for budget, values in ends.items()})
    found = needed(line, 70.0)
    assert found == pytest.approx({0: 4.0, 1: 2.0, 2: math.inf, 3: 8 * 4 ** (1 / 6)})  # half-way, at once, never, a sixth
    reused = Line("RE-widen-r2r", {1.0: {3: 60.0, 7: 60.0}, 2.0: {3: 80.0, 7: 80.0}}, {3: 75.0, 7: 65.0})
    assert needed(reused, 70.0) == pytest.approx({3: 0.0, 7: 2**0.5})
    scratch = Line("EQ-scratch", {2.0: {7: 60.0, 3: 60.0, 4: 1.0}, 8.0: {7: 80.0, 3: 80.0, 4: 1.0}})
    one = need(reused, scratch, 70.0)  # over the seeds that both have
    assert (one.reached, one.at_once, one.n) == (2, 1, 2)
    assert one.saving is not None
    assert one.saving.value == pytest.approx(1 - (2**0.5 / 2) / 4)
    assert need(line, line, 70.0).saving is None
    assert (need(line, scratch, 70.0).at_most, one.at_most) == (1, 0)  # of the one that has it at the smallest budget
    assert need(reused, scratch, 70.0).budget == pytest.approx(2**0.5 / 2)
    assert need(line, Line("EQ-scratch", line.ends), 70.0).saving is None  # one seed never has it


def test_what_reuse_adds_is_against_the_network_one_had(compared: Comparison) -> None:
    content = json.loads((KEPT / "protocol" / "RE-deepen-r2r@4.json").read_text())
    own = [content["curves"][str(seed)][0]["accuracy"] for seed in range(5)]
    small = compared.small("RE", "deepen")
    assert small is not None
    found = gain(compared.lines["RE-deepen-r2r"], small, 4)  # which begins where the small one is
    assert found is not None
    assert found.value == pytest.approx(100 * statistics.mean(end[-1] - end[0] for end in own))
    assert gain(compared.lines["RE-deepen-r2r"], small, 3) is gain(compared.scratch, compared.scratch, 4) is None
    padded = gain(compared.lines["RE-widen-random"], compared.small("RE", "widen"), 4)  # type: ignore[arg-type]
    assert padded is not None
    assert padded.value < 10  # though it lost nearly all when it was padded


def test_intervals_are_students(compared: Comparison) -> None:
    values = [1.0, 4.0, 2.5, 7.0, 3.0]
    reach = 2.776 * statistics.stdev(values) / 5**0.5
    found = student(values)
    assert (found.low, found.high) == pytest.approx((3.5 - reach, 3.5 + reach))
    assert not student([3.0]).clear


def test_seeds_are_paired_by_their_numbers(tmp_path: Path) -> None:
    results = read_all(KEPT / "protocol")
    other = json.loads(json.dumps(results["EQ-widen-r2r@8"]))
    other["curves"] = {"7" if seed == "4" else seed: curves for seed, curves in other["curves"].items()}
    other["seeds"] = [0, 1, 2, 3, 7]
    found = lines({**results, "EQ-widen-r2r@8": other})
    pairs = list(zip(ends("EQ-widen-r2r@8"), ends("EQ-scratch@8"), strict=True))[:4]
    one = gap(found["EQ-widen-r2r"], found["EQ-scratch"], 8)
    assert one is not None
    assert (one.n, one.value) == (4, pytest.approx(statistics.mean(a - b for a, b in pairs)))
    with pytest.raises(ResultsError, match="lack EQ-scratch"):
        lines({name: content for name, content in results.items() if "scratch" not in name})


def test_the_sweep_is_against_the_run_in_which_nothing_changes(compared: Comparison) -> None:
    row = next(
        one for one in compared.swept if (one.what, one.account, one.setting, one.value) == ("widen", "reuse", "rate", 0.2)
    )
    pairs = zip(ends("SWEEP-widen-reuse-rate-0.2", "sweep"), ends("SWEEP-widen-reuse-rate-1.0", "sweep"), strict=True)
    assert row.difference is not None
    assert row.difference.value == pytest.approx(statistics.mean(a - b for a, b in pairs))
    assert not [one for one in compared.swept if one.what == "deepen" and one.setting == "scale"]


def taken_apart(svg: str) -> tuple[str, list[float]]:
    """A picture without its positions and the names made from them, and the positions."""
    svg, position = re.sub(r"\b[mp][0-9a-f]{10}\b", "", svg), re.compile(r"-?\d+\.\d+")
    return position.sub("", svg), [float(place) for place in position.findall(svg)]


def test_the_page_is_what_the_results_say(compared: Comparison, tmp_path: Path) -> None:
    page = tmp_path / "does-it-pay.md"
    assert pays.main(["--out", str(page)]) == 0
    kept = ROOT / "docs" / "results" / "does-it-pay.md"
    assert page.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), "`python -m experiments.pays` writes it anew"
    drawn, shown = (path.with_suffix(".svg").read_text(encoding="utf-8") for path in (page, kept))
    if matplotlib.__version_info__ >= (3, 11):
        assert drawn == shown
    else:  # earlier ones leave other margins
        (texts, places), (known, expected) = taken_apart(drawn), taken_apart(shown)
        assert texts == known
        assert places == pytest.approx(expected, abs=3)
    scratch, best = statistics.mean(ends("EQ-scratch@4")), statistics.mean(ends("EQ-deepen-r2r-0.5@4"))
    told = re.search(
        r"deepening, from nothing: the best − scratch \| – \| .+? \| \*\*\+(.+?)\*\* r2r, grown after 50 %",
        page.read_text(encoding="utf-8"),
    )
    assert told is not None
    assert told[1] == f"{best - scratch:.1f}"


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def row(label: str, differences: Sequence[tuple[float, bool] | None]) -> str:
    """A row of a table: differences with a sign, in bold where they are clear."""
    shown = [one or (None, False) for one in differences]
    texts = [("–" if value is None else f"{round(value, 1) + 0.0:+.1f}".replace("-", "−"), clear) for value, clear in shown]
    return "| " + " | ".join([label, *(f"**{text}**" if clear else text for text, clear in texts)]) + " |"


def test_the_pages_say_what_the_results_say(compared: Comparison) -> None:
    page = (ROOT / "docs" / "does-it-pay.md").read_text(encoding="utf-8")
    text, readme = words("docs/does-it-pay.md"), words("README.md")
    long = (2, 4, 8, 16, 32)
    own, fair = own_of(compared), fairest(compared)
    assert own is not None
    right = set()  # rows that tables may have
    for what, verb, small in (("widen", "widened", "widening"), ("deepen", "deepened", "deepening")):
        for (account, budgets_), (way, named) in itertools.product(
            (("RE", (4, 8, 16)), ("EQ", long)), (("r2r", "R2R"), ("", "best method"))
        ):
            for rival, other in (("scratch", "scratch"), ("alone", "the small network, trained further")):
                found = against(fair, account, what, way)[rival]
                tried = [found[one] if way or found[one].tried > 1 else None for one in budgets_]
                right.add(row(f"{verb} ({named}) − {other}", [(one.gap.value, one.clear) if one else None for one in tried]))
        arms = {f"{verb} after 10 % of the budget": "r2r-0.1", f"{verb} after 10 %": "r2r-0.1"}
        arms |= {f"{verb} after 25 %": "r2r", f"{verb} after 50 %": "r2r-0.5"}
        lines_ = {label: compared.lines[f"EQ-{what}-{way}"] for label, way in arms.items()}
        for label, line in lines_.items():
            gaps = [gap(line, compared.scratch, budget) for budget in long]
            right.add(row(label, [(one.value, one.clear) for one in gaps if one is not None]))
        alone = [gap(fair.lines[f"EQ-small-{what}"], fair.scratch, budget) for budget in long]
        label = f"the small network for {small}, alone − scratch"
        right.add(row(label, [(one.value, one.clear) for one in alone if one is not None]))
    shown = [line for line in page.splitlines() if re.match(r"\| (widened|deepened|the small)", line)]
    assert len(shown) == 15
    assert set(shown) <= right
    for what, verb in (("deepen", "deepened"), ("widen", "widened")):
        leads = [gap(own.lines[f"RE-{what}-r2r"], own.lines[f"RE-{what}-random"], budget) for budget in (1, 4, 16)]
        expected = row(f"R2R − random padding, {verb}", [(one.value, one.clear) for one in leads if one is not None])
        assert expected in page.splitlines()
    reuse, nothing = against(fair, "RE", "widen", "r2r"), against(fair, "EQ", "widen", "r2r")
    assert f"{reuse['scratch'][4].gap.value:.1f} points more accurate than one trained from scratch for four epochs" in readme
    assert f"after eight epochs scratch is {-nothing['scratch'][8].gap.value:.1f} points ahead" in readme
    assert min(nothing["scratch"].values(), key=lambda one: one.gap.value) is nothing["scratch"][8]
    target = compared.targets()["scratch at 8"]
    ours, best = (
        need(compared.lines["RE-widen-r2r"], compared.scratch, target),
        saving_elsewhere(compared, compared.of("RE", "widen"), target),
    )
    assert ours.saving is not None
    assert best is not None
    less = (
        f"{ours.saving.value:.0%} fewer FLOPs by R2R, and with the settings of R2R {best[0].value:.0%} fewer by the best method"
    )
    assert less.replace("%", " %") in text
    orders = [compared.lines[f"EQ-both-{what}-first"] for what in ("widen", "deepen")]
    first = [gap(*orders, budget) for budget in (2, 4, 8, 16, 32)]
    assert f"{min(x.value for x in first if x):.1f} to {max(x.value for x in first if x):.1f} points better" in text
    ahead = {
        (way, budget): one
        for way in ("net2net", "netmorph", "copies")
        for budget in (4, 16)
        if (one := gap(own.lines[f"RE-widen-{way}"], own.lines["RE-widen-r2r"], budget))
    }
    at_sixteen = [one.value for (_, budget), one in ahead.items() if budget == 16]
    assert f"{min(at_sixteen):.1f} to {max(at_sixteen):.1f} points above R2R at a budget of sixteen epochs" in text
    clearly = {way for way, one in ahead.items() if one.clear}
    assert clearly == {("netmorph", 4), ("net2net", 16), ("netmorph", 16), ("copies", 16)}
    assert f"at four only NetMorph is clearly ahead, by {ahead['netmorph', 4].value:.1f} points" in text
    moments = {
        what: {
            (budget, other): gap(compared.lines[f"EQ-{what}-r2r-0.5"], compared.lines[f"EQ-{what}-{other}"], budget)
            for budget in long
            for other in ("r2r", "r2r-0.1")
        }
        for what in ("widen", "deepen")
    }
    assert all(one and one.clear and one.value < 0 for (budget, _), one in moments["widen"].items() if budget >= 8)
    assert all(one and one.value > 0 for one in moments["deepen"].values())
    clear = {budget for budget in long if all(one and one.clear for (at, _), one in moments["deepen"].items() if at == budget)}
    assert clear == {2, 4}
    assert "after 50 % is the best at every budget, clearly so at two and four epochs" in text
    assert [budget for budget, one in zip(long, first, strict=True) if one and one.clear] == [4, 8]
    padded = [gap(own.lines[f"EQ-{what}-r2r"], own.lines[f"EQ-{what}-random"], 8) for what in ("widen", "deepen")]
    assert not any(one is None or one.clear for one in padded)
    deep = {
        (line.way, budget): one
        for line in own.of("RE", "deepen")
        for budget in (1, 4, 16)
        if line.way != "r2r" and (one := gap(line, own.lines["RE-deepen-r2r"], budget))
    }
    assert not any(one.clear and one.value > 0 for one in deep.values())
    assert all(one.clear and one.value < 0 for (_, budget), one in deep.items() if budget == 1)
    others_than_one_cosine = [
        one
        for what in ("widen", "deepen")
        for schedule in ("flops", "rewarm", "repeak")
        for budget in (8, 16)
        if (one := gap(own.lines[f"EQ-{what}-r2r-{schedule}"], own.lines[f"EQ-{what}-r2r"], budget))
    ]
    (helpful,) = [one for one in others_than_one_cosine if one.clear]
    assert f"adds {helpful.value:.1f} points when widening at a budget of eight epochs; the other eleven" in text
    assert remaining([one.p for one in others_than_one_cosine]) == 0
    assert "neither is this one when their number is corrected for" in text
    assert len(others_than_one_cosine) == 12
    alone = gap(fair.lines["EQ-deepen-r2r"], fair.lines["EQ-small-deepen"], 32)
    assert alone is not None
    assert alone.clear
    assert f"at thirty-two epochs the deepened network is {alone.value:.1f} points above the small one alone" in text
    two = {what: gap(own.lines[f"EQ-{what}-r2r"], own.scratch, 2) for what in ("widen", "deepen")}
    assert two["widen"]
    assert two["deepen"]
    assert (two["widen"].clear, two["deepen"].clear) == (False, True)
    assert f"of the widened network there is +{two['widen'].value:.1f} and no longer clear" in text
    assert f"That of the deepened one is +{two['deepen'].value:.1f}" in text
    tried = [row for row in compared.swept if row.difference is not None]
    clear = [row.difference for row in tried if row.difference is not None and row.difference.clear]
    assert all(one.value < 0 for one in clear)
    assert f"Of {len(tried)} changes" in text
    assert f"none helped, {len(clear)} do harm, {holm(tried)} clearly so when their number is corrected for" in text


def test_the_pages_say_how_long_it_took() -> None:
    def minutes(*folders: str) -> float:
        apart = {arm.name for arm in own_tuning.tuning_arms({})}  # runs tuned for themselves come on top
        found = [item for folder in folders for item in read_all(KEPT / folder).items()]
        contents = [content for name, content in found if name not in apart and not name.startswith(own_tuning.PREFIX)]
        curves = [stages for one in contents if "H200" in one["device"] for stages in one["curves"].values()]
        return sum(stage["seconds"][-1] for stages in curves for stage in stages) / 60

    assert 25 < minutes("tuning", "sweep", "protocol") < 35
    took = json.loads((KEPT / "wall_time.json").read_text(encoding="utf-8"))
    more = sum(one["seconds"] for one in took["tuned_for_itself"]) / 60
    assert f"about half an hour on one H200, and {more:.0f} minutes more" in words("docs/does-it-pay.md")
    table = took["table"]
    assert f"took {table['seconds'] / 60:.1f} minutes from its start to the report" in words("docs/paper.md")
    assert f"each of the {table['runs_that_end_as_the_committed_ones']} runs ended" in words("docs/paper.md")
    assert table["runs"] == table["runs_that_end_as_the_committed_ones"] == table["arms"] * table["seeds"]


def test_remarks_are_of_the_earlier_results(compared: Comparison) -> None:
    def mean(arm: str, folder: str) -> float:
        return statistics.mean(ends(arm, folder))

    first, second = compared.remarks
    ahead = mean("EQ-scratch@8", "protocol") - mean("RE-widen-r2r@8", "earlier")
    assert f"scratch was {ahead:.1f} points ahead" in first
    better = [mean(f"EQ-scratch@{budget}", "earlier") - mean(f"EQ-scratch@{budget}", "protocol") for budget in (2, 4)]
    assert f"by {better[0]:.1f} points at budget 2 and {better[1]:.1f} at budget 4" in second
    page = (ROOT / "docs" / "results" / "does-it-pay.md").read_text(encoding="utf-8")
    assert all(remark in page for remark in compared.remarks)


def test_the_best_of_several_has_several_chances() -> None:
    line = Line("EQ-widen-r2r", {})
    above, below = student([0.1, 0.3, 0.2, 0.5, 0.4]), student([-0.1, -0.3, -0.2, -0.5, -0.4])
    assert above.p == pytest.approx(0.0132, abs=1e-4)  # t = 4.243 with 4 degrees of freedom, from a table
    assert Best(line, above, 3).clear
    assert not Best(line, above, 4).clear
    assert Best(line, below, 4).clear  # where the best is worse, all are


def test_corrected_for_their_number() -> None:
    def row(p: float) -> Swept:
        return Swept("widen", "reuse", "rate", 0.5, 0.0, Estimate(-1.0, -2.0, -0.1, 5, p))

    assert holm([row(p) for p in (0.03, 0.001, 0.02, 0.2)]) == 1  # 0.001 < 0.05 / 4, but 0.02 > 0.05 / 3
    assert holm([row(p) for p in (0.02, 0.001, 0.01)]) == 3
    assert holm([]) == 0


def test_plots_have_both_accounts(compared: Comparison) -> None:
    arms = {arm["name"]: arm for arm in budgets.data(compared)["pays-deepen"]["arms"]}
    assert arms["scratch"]["reuse"] is None
    assert arms["r2r"]["reuse"]["epochs"] == [1, 2, 4, 8, 16]
    assert arms["fade"]["reuse"]["epochs"] == [1, 4, 16]
    assert arms["r2r"]["nothing"]["mean"][1] == pytest.approx(statistics.mean(ends("EQ-deepen-r2r@4")), abs=1e-3)


def test_missing_sets_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="there are no results in"):
        read(tmp_path)
    with pytest.raises(SystemExit, match="there are no results in"):
        pays.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.md")])
    assert not list(tmp_path.iterdir())
