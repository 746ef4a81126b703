"""The honest comparison's numbers, against the raw files by plain loops; and its page, which says what the files say."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from experiments import budgets, pays
from experiments.comparison import Comparison, Line, flops, gap, need, needed, read
from experiments.figures import RESULTS
from experiments.flops import step_flops
from experiments.models import Net
from experiments.results import ResultsError

KEPT = RESULTS.parent
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return read(KEPT)


def ends(arm: str, folder: str = "protocol") -> list[float]:
    content = json.loads((KEPT / folder / f"{arm}.json").read_text())
    return [100 * content["curves"][str(seed)][-1]["accuracy"][-1] for seed in range(5)]


def test_lines_are_the_ends_of_runs(compared: Comparison) -> None:
    for name, budget in (("EQ-scratch", 16), ("EQ-widen-r2r-0.1", 4), ("RE-deepen-fade", 2), ("EQ-both-widen-first", 32)):
        assert compared.lines[name].ends[budget] == pytest.approx(ends(f"{name}@{budget}"))
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
    line = Line(
        "EQ-widen-r2r", {2.0: [60.0, 71.0, 50.0, 60.0], 8.0: [80.0, 72.0, 60.0, 69.0], 32.0: [81.0, 73.0, 69.0, 75.0]}, {}
    )
    found = needed(line, 70.0)
    assert found == pytest.approx([4.0, 2.0, math.inf, 8 * 4 ** (1 / 6)])  # half-way, at once, never, a sixth of the way
    reused = Line("RE-widen-r2r", {1.0: [60.0, 60.0], 2.0: [80.0, 80.0]}, {}, [75.0, 65.0])
    assert needed(reused, 70.0) == pytest.approx([0.0, 2**0.5])
    scratch = Line("EQ-scratch", {2.0: [60.0, 60.0], 8.0: [80.0, 80.0]}, {})
    one = need(reused, scratch, 70.0)
    assert (one.reached, one.n) == (2, 2)
    assert one.saving is not None
    assert one.saving.value == pytest.approx(1 - (2**0.5 / 2) / 4)
    assert need(line, line, 70.0).saving is None


def test_the_sweep_is_against_the_run_in_which_nothing_changes(compared: Comparison) -> None:
    row = next(
        one for one in compared.swept if (one.what, one.account, one.setting, one.value) == ("widen", "reuse", "rate", 0.2)
    )
    pairs = zip(ends("SWEEP-widen-reuse-rate-0.2", "sweep"), ends("SWEEP-widen-reuse-rate-1.0", "sweep"), strict=True)
    assert row.difference is not None
    assert row.difference.value == pytest.approx(statistics.mean(a - b for a, b in pairs))
    assert not [one for one in compared.swept if one.what == "deepen" and one.setting == "scale"]


def test_the_page_is_what_the_results_say(compared: Comparison, tmp_path: Path) -> None:
    page = tmp_path / "does-it-pay.md"
    assert pays.main(["--out", str(page)]) == 0
    kept = ROOT / "docs" / "does-it-pay.md"
    assert page.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), "`python -m experiments.pays` writes it anew"
    assert page.with_suffix(".svg").read_bytes() == kept.with_suffix(".svg").read_bytes()
    scratch, best = statistics.mean(ends("EQ-scratch@4")), statistics.mean(ends("EQ-deepen-r2r-0.5@4"))
    assert f"+{best - scratch:.1f} at 4 (r2r, grown after 50 %)" in page.read_text(encoding="utf-8")


def test_plots_have_both_accounts(compared: Comparison) -> None:
    arms = {arm["name"]: arm for arm in budgets.data(compared)["pays-deepen"]["arms"]}
    assert arms["scratch"]["reuse"] is None
    assert arms["fade"]["reuse"]["epochs"] == [1, 2, 4, 8, 16]
    assert arms["r2r"]["nothing"]["mean"][1] == pytest.approx(statistics.mean(ends("EQ-deepen-r2r@4")), abs=1e-3)


def test_missing_sets_are_told(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="there are no results in"):
        read(tmp_path)
    with pytest.raises(SystemExit, match="there are no results in"):
        pays.main(["--results", str(tmp_path), "--out", str(tmp_path / "page.md")])
    assert not list(tmp_path.iterdir())
