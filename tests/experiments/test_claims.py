"""The paper's claims and the findings, against the raw files by plain loops."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from experiments import paper
from experiments.figures import RESULTS
from experiments.pages.parts import cost_tables, filter_table
from experiments.reading.against_paper import claims
from experiments.reading.answers import answers, best_elsewhere, opening, saving_elsewhere
from experiments.reading.comparison import Comparison, needed, read
from experiments.reading.curves import Estimate
from experiments.reading.diversity import read_filters
from experiments.reading.earlier_runs import earlier, notes
from experiments.reading.filter_changes import changes, smooth
from experiments.reading.findings import findings, lede
from experiments.reading.paper_items import DEFINITIONS, FIGURES, TABLE_1, Item
from experiments.reading.result_files import file_name, read_paper
from experiments.reading.rivals import fairest, scratches
from experiments.reading.tables import Numbers, beside_paper, image_error, numbers
from experiments.reading.words import plain
from experiments.setting.arms import paper_arms
from experiments.setting.more_arms import more_arms

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> Numbers:
    return numbers(read_paper(RESULTS), read_filters(RESULTS))


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return read(RESULTS.parent)


def curves(arm: str, folder: str = "table") -> list[list[float]]:
    content = json.loads((RESULTS.parent / folder / file_name(arm)).read_text())
    return [[100 * value for value in stages[-1]["accuracy"][1:]] for stages in content["curves"].values()]


def test_the_page_of_items_is_what_the_results_say(tmp_path: Path) -> None:
    assert paper.main(["--out", str(tmp_path / "paper.md")]) == 0
    kept = (ROOT / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    assert (tmp_path / "paper.md").read_text(encoding="utf-8") == kept, "`python -m experiments.paper` writes it again"


@pytest.mark.parametrize("item", [*DEFINITIONS, *TABLE_1, *FIGURES], ids=lambda item: item.text[:30])
def test_items_of_the_paper_name_code_and_tests_that_exist(item: Item) -> None:
    assert (ROOT / item.code).exists()
    path, _, test = item.check.partition("::")
    assert f"def {test}" in (ROOT / path).read_text(encoding="utf-8")


def test_results_of_an_earlier_description_are_named(found: Numbers) -> None:
    arms = {arm.name: arm for arm in (*paper_arms(), *more_arms())}
    same = {name: {"arm": json.loads(json.dumps(asdict(arm))), "data": "CIFAR-10, held out"} for name, arm in arms.items()}
    assert earlier(same) == {}
    narrow = same | {"NCT-R2DeeperR": {**same["NCT-R2DeeperR"], "arm": same["NCT-R2DeeperR(narrow)"]["arm"]}}
    assert earlier(narrow) == {"8/16 channels instead of 12/24 channels": ["NCT-R2DeeperR"]}
    page = (ROOT / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    assert all(f"- {note}" in page for note in notes(found.results))


def test_a_row_of_table_2_by_hand() -> None:
    page = (ROOT / "docs" / "results" / "paper.md").read_text(encoding="utf-8")
    ends = [run[-1] for run in curves("NCT-R2WiderR")]
    row = next(line for line in page.splitlines() if line.startswith("| NCT-R2WiderR |"))
    assert f"| 69.9 ± 1.45 | {statistics.mean(ends):.2f} ± {statistics.stdev(ends):.2f} |" in row
    assert f"{statistics.mean(ends) - 69.9:+.2f}".replace("-", "−") in row


def test_the_papers_accuracies_have_the_error_of_a_thousand_images() -> None:
    assert image_error(70.0, 1_000) == pytest.approx(1.449, abs=1e-3)
    one = beside_paper([71.0, 71.0, 71.0], 70.0)  # seeds that agree: images alone
    assert one.value == pytest.approx(1.0)
    images = 1.96 * math.sqrt(70 * 30 / 1_000 + 71 * 29 / 10_000)
    assert (one.low, one.high) == pytest.approx((1 - images, 1 + images))
    assert not one.clear
    assert beside_paper([64.0, 64.5, 63.8], 70.0).clear


def test_the_fairest_scratch_ends_highest_among_its_kind(found: Numbers) -> None:
    for student in ("NCT-R2WiderR", "NCT-Net2WiderNet"):
        rivals = scratches(found.results, student)
        assert rivals
        skips = found.results[student]["arm"]["net"]["residual"]
        for name in rivals:
            arm = found.results[name]["arm"]
            assert arm["net"]["residual"] == skips
            assert not [stage for stage in arm["stages"] if stage["grow"]]
            assert (arm["net"]["r"], arm["net"]["blocks"]) == (3 / 16, 4)  # 1/8, widened by half
        best = max(rivals, key=lambda name: statistics.mean(value for run in curves(name) for value in run[-10:]))
        assert fairest(found.results, student) == best
    assert "FTT-RandomWide" in scratches(found.results, "NCT-R2WiderR")


def test_pairs_are_compared_over_the_whole_run(found: Numbers) -> None:
    text = " ".join(one.text for one in findings(found))
    pairs, zero = curves("NCT-R2DeeperR(paper)"), curves("NCT-R2DeeperR")
    leads = [statistics.mean(a[-200:]) - statistics.mean(b[-200:]) for a, b in zip(pairs, zero, strict=True)]
    reach = 2.776 * statistics.stdev(leads) / 5**0.5
    mean = statistics.mean(leads)
    said = f"{mean:+.2f} [{mean - reach:+.2f}, {mean + reach:+.2f}] points".replace("-", "−")
    assert f"Over the last 200 epochs pairs less γ = 0: {said}" in text


def test_arms_that_fall_after_an_exact_growth_are_named(found: Numbers) -> None:
    text = next(one.text for one in findings(found) if one.title.startswith("Exact is not enough"))
    for row in found.growths:
        if row.preserving and row.before is not None:
            fell = row.one_epoch < row.before - 1
            assert (f"{row.arm} {row.before:.1f} → {row.one_epoch:.1f} %" in text) == fell, row.arm
    assert "VIZ-R2R × " in text
    assert not [one for one in findings(found) if "loses nothing" in one.title]


def test_what_becomes_of_filters(found: Numbers) -> None:
    """By loops over single filters of one arm and seed."""
    rows = changes(found.filters)

    def cosine(one: np.ndarray, other: np.ndarray) -> float:
        return float((one * other).sum() / math.sqrt(float((one**2).sum())) / math.sqrt(float((other**2).sum())))

    seeds = sorted(int(name.split("/")[1]) for name in found.filters if name.startswith("VIZ-R2R/") and name.endswith("/end"))
    kept, twins, others = [], [], []
    for seed in seeds:
        before, after, end = (found.filters[f"VIZ-R2R/{seed}/{when}"] for when in ("before", "after", "end"))
        kept.append(statistics.mean(cosine(before[k], end[k]) for k in range(16)))
        assert all(np.array_equal(after[16 + k], after[24 + k]) for k in range(8))  # these are the pairs
        twins.append(statistics.mean(cosine(end[16 + k], end[24 + k]) for k in range(8)))
        others.append(
            statistics.mean(cosine(end[16 + k], end[24 + j]) for k, j in itertools.product(range(8), repeat=2) if k != j)
        )
    row = rows["VIZ-R2R"]
    assert row.kept.value == pytest.approx(statistics.mean(kept))
    assert row.twins.value == pytest.approx(statistics.mean(twins))
    assert row.others.value == pytest.approx(statistics.mean(others))
    by_seed = [np.linalg.norm(found.filters[f"VIZ-NetMorph/{seed}/end"].reshape(32, -1), axis=1) for seed in seeds]
    assert rows["VIZ-NetMorph"].size.value == pytest.approx(statistics.mean(n[16:].mean() / n[:16].mean() for n in by_seed))


def test_patterns_and_colours_of_filters_that_are_one_colour() -> None:
    """A filter that is a colour times a pattern has exactly these."""
    rng = np.random.default_rng(0)
    colours, patterns = rng.normal(size=(6, 3)), rng.normal(size=(6, 7, 7))
    start = colours[:, :, None, None] * patterns[:, None]
    end = start.copy()
    end[2] = (colours[2] @ np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]]))[:, None, None] * patterns[2]  # another colour
    end[3] = colours[3][:, None, None] * patterns[3].T  # another pattern
    filters = {"VIZ-X/0/before": start[:2], "VIZ-X/0/after": start, "VIZ-X/0/end": end}
    row = changes(filters)["VIZ-X"]
    colour = abs(float(colours[2] @ np.roll(colours[2], 1))) / float(colours[2] @ colours[2])
    pattern = abs(float((patterns[3] * patterns[3].T).sum())) / float((patterns[3] ** 2).sum())
    assert row.colour.value == pytest.approx((colour + 3) / 4)
    assert row.pattern.value == pytest.approx((pattern + 3) / 4)
    assert row.kept.value == pytest.approx(1)


def test_the_best_way_is_chosen_on_other_seeds(compared: Comparison) -> None:
    ways = [line for line in compared.of("RE", "widen") if 4 in line.ends]
    small = compared.small("RE", "widen")
    assert small is not None
    leads = []
    for seed in range(5):
        scores = {line.name: sum(value for one, value in line.ends[4].items() if one != seed) for line in ways}
        best = max(scores, key=lambda name: scores[name])
        leads.append(compared.lines[best].ends[4][seed] - small.ends[4][seed])
    one = best_elsewhere(compared, "RE", "widen", "alone", 4)
    assert one is not None
    assert one.value == pytest.approx(statistics.mean(leads))
    flattered = max(statistics.mean(line.values(4)) for line in ways) - statistics.mean(small.values(4))
    assert one.value <= flattered + 1e-9


def test_savings_of_the_best_way_do_not_flatter(compared: Comparison) -> None:
    target = compared.targets()["scratch at 8"]
    made = saving_elsewhere(compared, compared.of("RE", "widen"), target)
    assert made is not None
    best = max(
        1 - statistics.mean(needed(line, target).values()) / statistics.mean(needed(compared.scratch, target).values())
        for line in compared.of("RE", "widen")
        if all(map(math.isfinite, needed(line, target).values()))
    )
    assert 0 < made[0].value <= best
    assert made[1]


def test_r2r_against_random_padding_is_told_by_budget(compared: Comparison) -> None:
    card = next(one for one in answers(compared) if one.title.startswith("Preserving the function"))
    own, at_those_of_r2r = (
        next(strip.cells for strip in strips if strip.name.startswith("deepening, reuse"))
        for strips in (card.strips, card.more)
    )

    def lead(budget: int, *files: str) -> float:
        ends = [curves(f"{name}@{budget}", "protocol") for name in files]
        return statistics.mean(a[-1] - b[-1] for a, b in zip(*ends, strict=True))

    for budget in (1, 2, 4, 8, 16):
        assert at_those_of_r2r[str(budget)].value == pytest.approx(lead(budget, "RE-deepen-r2r", "RE-deepen-random"))
    assert own["1"].value == pytest.approx(lead(1, "OWN-RE-deepen-r2r", "OWN-RE-deepen-random"))
    assert own["16"].value == pytest.approx(lead(16, "RE-deepen-r2r", "RE-deepen-random"))
    assert f"leads random padding by {own['1'].value:.1f} points at budget 1" in card.title
    assert opening(compared).count(".") < 4  # one sentence, with a decimal or two


def test_tables_of_compute_have_no_targets_of_other_groups(found: Numbers) -> None:
    for title, made in cost_tables(found):
        for row in re.findall(r"<tr><th scope=\"row\">.*?</tr>", made):
            cells = re.findall(r"<td class=n>(.*?)</td>", row)
            assert any(cell != "–" for cell in cells), title
        columns = list(zip(*(re.findall(r"<td class=n>(.*?)</td>", row) for row in made.split("<tr>")[2:]), strict=True))
        assert all(sum(cell != "–" for cell in column) > 1 for column in columns), title


def test_compute_is_told_by_device(found: Numbers) -> None:
    """The committed runs are of one GPU, but for two arms. Stages that arms share are trained once, so they count once."""

    def minutes(device: str, arms: Container[str]) -> int:
        seconds: dict[str, float] = {}
        for name, content in found.results.items():
            arm = content["arm"]
            for seed, pieces in content["curves"].items() if name in arms and content["device"] == device else ():
                for place, piece in enumerate(pieces, start=arm["own"] + 1):
                    key = json.dumps([arm["net"], arm["stages"][:place], arm["optimizer"], arm["flips"], seed])
                    seconds[key] = piece["seconds"][-1] + piece["growth"].get("seconds", 0.0)
        return round(sum(seconds.values()) / 60)

    gpu, cpu = minutes("NVIDIA H200", found.results), minutes("x86_64", found.results)
    table = minutes("NVIDIA H200", {arm.name for arm in paper_arms()})
    assert f"in {gpu} minutes on one NVIDIA H200 and {cpu} minutes on one CPU (x86_64)" in lede(found)
    page = " ".join((ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split())
    assert f"took {gpu} minutes of training on one H200, {table} of them for the arms of the paper's table" in page


def test_verdicts_on_filters_are_of_runs_to_the_end(found: Numbers) -> None:
    """Runs for other questions end 20 epochs after the growth: the table says so, and verdicts leave them out."""
    for arm in ("VIZ-R2R(carried)", "VIZ-NetMorph(writers)"):
        assert found.results[arm]["arm"]["stages"][-1]["epochs"] == 20
    rows = {row.partition("</th>")[0]: row for row in filter_table(found).split("<tr>")[2:]}
    for name, row in rows.items():
        epochs = "20" if "state carried" in name or "zero writers" in name else "450"
        assert f"</th><td class=n>{epochs}</td>" in row, name
    said = next(one for one in claims(found) if one.paper.startswith("Network Morphism’s new filters"))
    size = changes(found.filters)["VIZ-NetMorph"].size.value
    assert f"With zero readers their size is {size:.2f}" in said.ours
    assert "With zero writers, as in the figure, they stay zero" in said.ours


def test_intervals_of_cosines_end_at_one(found: Numbers) -> None:
    cells = [
        cell for row in filter_table(found).split("<tr>")[2:] for number, cell in enumerate(row.split("<td")) if number != 5
    ]
    numbers_in = [float(value.replace("−", "-")) for cell in cells for value in re.findall(r"[−]?\d+\.\d\d", cell)]
    assert min(numbers_in) >= -1
    assert max(numbers_in) == 1


def test_the_rate_drop_alone_does_what_the_growth_seems_to_do(found: Numbers) -> None:
    """The first epoch after which each seed has the accuracy, of the grown network and of the one that is not grown."""
    card = next(one for one in findings(found) if one.title.startswith("On the paper’s schedule"))
    target = float(re.search(r"to (\d+\.\d) %", card.text)[1])  # type: ignore[index]
    epochs = [
        [next(n for n, value in enumerate(run) if value >= target) for run in curves(arm)]
        for arm in ("NCT-R2DeeperR", "NCT-DeepenTeacher(dropped)")
    ]
    assert statistics.mean(epochs[1]) <= statistics.mean(epochs[0]) + 2
    assert card.title.endswith("the same without growing: it is the rate drop")


def test_noise_does_not_make_filters_diverse(found: Numbers) -> None:
    """By a Fourier transform written out, and loops over pairs."""
    waves = np.exp(-2j * np.pi * np.outer(range(7), range(7)) / 7)
    low = np.array([0, 1, 0, 0, 0, 0, 1]) + np.array([1, 0, 0, 0, 0, 0, 0])  # frequencies 0, 1 and −1 of 7

    def diversity(filters: np.ndarray) -> float:
        kept = np.einsum("ux,oixy,vy->oiuv", waves, filters, waves) * np.outer(low, low)
        flat = (np.einsum("xu,oiuv,yv->oixy", waves.conj(), kept, waves.conj()).real / 49).reshape(len(filters), -1)
        size = np.linalg.norm(filters.reshape(len(filters), -1), axis=1)
        flat = (flat - flat.mean(axis=1, keepdims=True))[size > np.median(size) / 1000]
        pairs = itertools.combinations(flat, 2)
        return statistics.mean(1 - abs(a @ b) / math.sqrt((a @ a) * (b @ b)) for a, b in pairs)

    seeds = range(5)
    for arm, row in changes(found.filters).items():
        if arm in ("VIZ-R2R", "VIZ-Net2Net"):
            by_hand = statistics.mean(diversity(found.filters[f"{arm}/{seed}/end"]) for seed in seeds)
            assert row.varied.value == pytest.approx(by_hand)
    before, noise = found.filters["VIZ-R2R/0/before"], np.random.default_rng(0).normal(size=(16, 3, 7, 7))
    coarse = smooth(np.repeat(before[:1], 16, axis=0))
    fine = noise - smooth(noise)
    assert np.allclose(smooth(coarse + fine), coarse)
    claim = next(one for one in claims(found) if one.place == "Abstract")
    assert claim.verdict == "differs"


def test_values_that_are_large_beside_the_others_do_harm_without_batch_norm(found: Numbers) -> None:
    fell = []
    for arm in ("VIZ-R2R", "VIZ-R2R(scale3)", "VIZ-R2R(scale10)"):
        content = json.loads((RESULTS / file_name(arm)).read_text())
        grown = [100 * (stages[1]["accuracy"][1] - stages[0]["accuracy"][-1]) for stages in content["curves"].values()]
        fell.append(f"{statistics.mean(grown):+.1f}".replace("-", "−"))
    claim = next(one for one in claims(found) if one.paper.startswith("New weights that are large"))
    assert f"at one, three and ten times the scale: {', '.join(fell)} points" in claim.ours
    assert claim.verdict == "agrees"


def test_zero_has_no_sign() -> None:
    assert plain(Estimate(-0.001, -0.08, 0.0, 5)) == "0.00 [−0.08, 0.00]"


def test_a_claim_is_a_sentence_with_few_numbers(found: Numbers) -> None:
    made = claims(found)
    assert len(made) >= 14
    assert {one.verdict for one in made} <= {"agrees", "in part", "differs", "not run"}
    for one in made:
        assert len(re.findall(r"[+−]?\d+(?:\.\d+)?", one.ours)) <= 14, one.ours
    for card in findings(found):
        assert len(card.title) < 120
