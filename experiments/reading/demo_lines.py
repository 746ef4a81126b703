"""The demo's results in figures and words: three ways to spend a budget, compared seed by seed, and the loss at the growth.

A difference is called one where its 95 % interval over paired seeds (Student's t) excludes zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.reading.curves import Estimate, Results, student
from experiments.reading.words import signed, tiny

LABELS = {
    "grown": "grown, trained on",
    "on": "trained on as it is",
    "scratch": "started over",
    "random": "random padding, trained on",
}
SHORT = {"grown": "grown", "on": "trained on", "scratch": "started over", "random": "random padding"}
SOON = 20  # steps after the growth


def budgets(results: Results) -> list[int]:
    """The budgets of all ways, in epochs of the wide network."""
    return sorted(int(name.split("@")[1]) for name in results if name.startswith("grown@"))


def ends(results: Results, way: str, budget: int) -> list[float]:
    """Final accuracy of each seed in per cent."""
    return [100 * stages[-1]["accuracy"][-1] for stages in results[f"{way}@{budget}"]["curves"].values()]


def start(results: Results) -> list[float]:
    """Accuracy of the small network when the budget begins."""
    return [100 * stages[-1]["accuracy"][-1] for stages in results["small"]["curves"].values()]


def lead(results: Results, rival: str, budget: int) -> Estimate:
    """How far the grown network ends ahead of a rival, in points."""
    pairs = zip(ends(results, "grown", budget), ends(results, rival, budget), strict=True)
    return student([ours - theirs for ours, theirs in pairs])


def spread(values: Sequence[float], digits: int = 1) -> str:
    rest = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{rest}"


def mark(one: Estimate) -> str:
    """▲ where the grown network is ahead, ▼ where it is behind, · where the seeds do not settle it."""
    return "·" if not one.clear else "▲" if one.value > 0 else "▼"


def loss_at_growth(results: Results, way: str) -> tuple[float, float, float]:
    """Test loss before and after the growth, and the largest change of outputs relative to the largest output."""
    grown = results[f"{way}@{budgets(results)[-1]}"]["curves"]
    before = statistics.fmean(stages[-1]["test_loss"][-1] for stages in results["small"]["curves"].values())
    after = statistics.fmean(stages[0]["test_loss"][0] for stages in grown.values())
    return before, after, max(stages[0]["growth"]["error"] for stages in grown.values())


def losses(results: Results, way: str, after: int = 60) -> tuple[list[int], list[float]]:
    """Training loss by step around the growth, mean over seeds; step 0 is the first one after it."""
    own = results[f"{way}@{budgets(results)[-1]}"]["curves"]
    before = [results["small"]["curves"][seed][-1]["last"] for seed in own]
    runs = [[*last, *stages[0]["steps"][:after]] for last, stages in zip(before, own.values(), strict=True)]
    mean = [statistics.fmean(values) for values in zip(*runs, strict=True)]
    return [step - len(before[0]) for step in range(len(mean))], mean


def against(one: Estimate, rival: str) -> str:
    """3.0 points ahead of a large one that starts over"""
    if not one.clear:
        return f"not clearly apart from {rival} ({signed(one.value)})"
    return f"{abs(one.value):.1f} points {'ahead of' if one.value > 0 else 'behind'} {rival}"


def sentences(results: Results) -> tuple[str, str]:
    """The result at the smallest and the largest budget, and what happens at the growth."""
    found, said = budgets(results), []
    for budget in (found[0], found[-1]):
        rivals = (("scratch", "a large one that starts over"), ("on", "the small one without growth"))
        parts = [against(lead(results, rival, budget), name) for rival, name in rivals]
        said.append(f"with a budget of {budget} epoch{'s' * (budget > 1)} it ends {parts[0]}, and {parts[1]}")
    before, after, error = loss_at_growth(results, "grown")
    _, padded, _ = loss_at_growth(results, "random")
    moved = abs(after - before)
    kept = "unchanged" if moved < 1e-4 else f"changed by {tiny(moved)}"
    return (
        f"A trained small network is grown and trained on: {'; '.join(dict.fromkeys(said))}.",
        f"At the growth outputs move by {tiny(error)} of the largest one at most, and the test loss is {kept}. Random padding "
        f"raises it from {before:.2f} to {padded:.2f}.",
    )


def text_table(results: Results) -> str:
    """Accuracy of each way at each budget, and the grown network's lead, for the terminal and docs/paper.md."""
    found = budgets(results)
    head = ["accuracy in %, budget of", *(f"{budget} epoch{'s' * (budget > 1)}" for budget in found)]
    rows = [[LABELS[way], *(spread(ends(results, way, budget)) for budget in found)] for way in LABELS]
    for rival in ("on", "scratch", "random"):
        cells = [lead(results, rival, budget) for budget in found]
        rows.append([f"grown − {SHORT[rival]}", *(f"{signed(one.value)} {mark(one)}" for one in cells)])
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]

    def laid(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([laid(head), "  ".join("─" * width for width in widths), *map(laid, rows)])
