"""The paper's claims, and whether they hold here.

Claims and explanations are fixed text; the result here and the verdict are computed. A verdict needs a difference whose 95 %
interval excludes zero; the paper's accuracies have the error of one run on 1,000 images (`tables.beside_paper`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from experiments.pages.looks import look
from experiments.reading.claim import AGREES, DIFFERS, PARTLY, Claim
from experiments.reading.filter_claims import FILTER_CLAIMS
from experiments.reading.rivals import against_fairest
from experiments.reading.tables import Numbers, cost, late_mean, paired
from experiments.reading.words import fewer, points, share, signed, tiny, verdict


def exact(numbers: Numbers) -> Claim | None:
    rows = [row for row in numbers.growths if row.preserving]
    if not rows:
        return None
    moved = [abs(row.drop.value) for row in rows if row.drop]
    said = (
        f"{sum(row.n for row in rows)} growths moved outputs by {tiny(max(row.error for row in rows))} of the largest at most"
    )
    return Claim(
        "§4, table 1",
        "R2R and Network Morphism preserve the function; Net2Net in expectation.",
        f"{said}, Net2Net’s too.",
        AGREES if max(moved, default=0.0) < 0.1 else DIFFERS,
        "Net2Net is exact here because each copy of a unit shares the outgoing weights of its source.",
    )


def finals(numbers: Numbers) -> Claim | None:
    rows = [row for row in numbers.final if row.difference is not None and "(" not in row.arm]
    if not rows:
        return None
    near = [row for row in rows if row.difference is not None and not row.difference.clear]
    far = [f"{row.arm} {signed(row.difference.value)}" for row in rows if row.difference is not None and row.difference.clear]
    return Claim(
        "Table 2",
        "All networks reach similar performance: 69.6 to 72.1 %.",
        f"{len(near)} of {len(rows)} arms agree within the errors" + (f"; the others: {', '.join(far)}." if far else "."),
        AGREES if not far else PARTLY if near else DIFFERS,
        "The paper’s accuracies are one run each on 1,000 images, ±1.45 points, so that 69.6 and 70.2 are one value."
        + narrower(numbers)
        + unexplained(numbers),
    )


def narrower(numbers: Numbers) -> str:
    """Deepened networks that have fewer channels than the author's."""
    arm = numbers.results.get("NCT-R2DeeperR", {}).get("arm", {"net": {"r": 3 / 16}})
    return " The deepened networks here have 8/16 channels, the author’s 12/24." if arm["net"]["r"] < 3 / 16 else ""


def unexplained(numbers: Numbers) -> str:
    """Net2WiderNet's distance from the paper: how much of it the last epoch's noise makes; the rest has no explanation."""
    row = numbers.end("NCT-Net2WiderNet")
    if row is None or row.paper is None or row.difference is None or not row.difference.clear:
        return ""
    return (
        f" Net2WiderNet is {signed(row.difference.value)} after its last epoch and {signed(row.late - row.paper)} over the "
        f"last ten "
        "(its rate is high to the end, so that single epochs are noisy); the rest is unexplained."
    )


STUDENTS = ("NCT-R2WiderR", "NCT-NetMorph", "NCT-R2DeeperR", "NCT-Net2WiderNet", "NCT-Net2DeeperNet")


PAPERS_SCRATCH = {"NCT-R2WiderR": "NCT-RandomWide", "NCT-NetMorph": "NCT-RandomWide", "NCT-R2DeeperR": "NCT-RandomDeep"}


def at_least_scratch(numbers: Numbers) -> Claim | None:
    pairs = [pair for name in STUDENTS if (pair := against_fairest(numbers.results, name))]
    if not pairs:
        return None
    worse = [pair for pair in pairs if pair.late.clear and pair.late.value < 0]
    said = "; ".join(f"{look(pair.arm).label} {signed(pair.late.value)}" for pair in pairs)
    own = [
        pair for one, other in PAPERS_SCRATCH.items() if (pair := paired(numbers.results, one, other, "the paper's scratch"))
    ]
    beside = "; ".join(f"{look(pair.arm).label} {signed(pair.late.value)}" for pair in own)
    rivals = "; ".join(
        f"{name}: {sum(stage['epochs'] for stage in numbers.results[name]['arm']['stages']):g} epochs"
        for name in sorted({pair.against for pair in pairs})
    )
    return Claim(
        "§6.1",
        "All three transforms converge to at least the score of the network from scratch.",
        f"Points against the fairest scratch, last ten epochs: {said}."
        + (f" Against the scratch of the paper’s table: {beside}." if beside else ""),
        DIFFERS if worse else AGREES,
        f"The fairest scratch is the one that ends highest among those of the same network ({rivals}; students have 250 epochs "
        "before the growth and 250 after it). Intervals: "
        + "; ".join(f"{look(pair.arm).label} {points(pair.late)}" for pair in pairs)
        + ".",
    )


def no_skips(numbers: Numbers) -> Claim | None:
    pair = paired(numbers.results, "NCT-Net2WiderNet", "NCT-R2WiderR", "r2r")
    if pair is None:
        return None
    with_skips = paired(numbers.results, "NCT-Net2WiderNet(Residual)", "NCT-R2WiderR", "r2r")
    beside = f" With skips: {verdict(with_skips.late, 'above', 'below')}." if with_skips else ""
    return Claim(
        "§6.1",
        "Net2Net’s networks, which have no residual connections, do not reach the others.",
        f"Net2WiderNet against R2WiderR: {verdict(pair.late, 'above', 'below')}.{beside}",
        AGREES if pair.late.clear and pair.late.value < 0 else DIFFERS,
        "The networks lack residual connections; this says nothing about Net2Net itself, as the paper says. outgrow’s "
        "Net2Net widens "
        "networks with skips too.",
    )


def overfit(numbers: Numbers) -> Claim | None:
    teacher, scratch = numbers.pair("OF-Student", "OF-Teacher"), numbers.pair("OF-Student", "OF-Rand")
    if teacher is None or scratch is None:
        return None
    holds = not (teacher.late.clear and teacher.late.value > 0) and scratch.late.clear and scratch.late.value < 0
    return Claim(
        "Figure 7",
        "A student of an overfitted teacher gains next to nothing, and scratch ends higher.",
        f"Against its teacher {points(teacher.late)}, against scratch {points(scratch.late)}.",
        AGREES if holds else DIFFERS,
        "Scratch has weight decay in the table and the teacher has none, so that this is about regularisation as well.",
    )


def he(numbers: Numbers) -> Claim | None:
    suffix = "(NoDrop)" if numbers.growth("BI-He(NoDrop)") and numbers.growth("BI-Std(NoDrop)") else ""
    he, std = numbers.growth(f"BI-He{suffix}"), numbers.growth(f"BI-Std{suffix}")
    if he is None or std is None or he.before is None:
        return None
    dips = he.one_epoch < he.before - 1 or std.one_epoch - he.one_epoch > 1
    setting = "rate not dropped" if suffix else "rate dropped, as the table says"
    return Claim(
        "Figure 10",
        "New weights by He’s initialisation make training unstable, and accuracy drops right after the growth.",
        f"Before and an epoch after ({setting}): He {he.before:.1f} → {he.one_epoch:.1f} %, matched {std.one_epoch:.1f} %.",
        AGREES if dips else DIFFERS,
        "The author’s code draws nearly zero where the paper says matched deviation, so that its He weights were much larger "
        "beside them. Batch norm behind every convolution also removes the scale of its weights. That the same is seen with "
        "deepening, as the paper says, was not run.",
    )


def large_values(numbers: Numbers) -> Claim | None:
    """Values much larger than those they join, in the one network here that has no batch norm."""
    rows = [row for name in ("VIZ-R2R", "VIZ-R2R(scale3)", "VIZ-R2R(scale10)") if (row := numbers.growth(name))]
    if len(rows) < 3 or any(row.before is None for row in rows):
        return None
    fell = [(row.before or 0) - row.one_epoch for row in rows]
    said = ", ".join(f"{signed(-drop)}" for drop in fell)
    loss = ", ".join(f"{row.soon:.0f}" for row in rows if row.soon is not None)
    return Claim(
        "§6.2",
        "New weights that are large beside existing ones make training unstable, and accuracy drops right after the growth.",
        f"Without batch norm, an epoch after the growth, at one, three and ten times the scale: {said} points.",
        AGREES if fell[0] + 5 < fell[1] < fell[2] else PARTLY if fell[2] > fell[0] + 5 else DIFFERS,
        (f"Training loss over the next 20 steps: × {loss}. " if loss else "")
        + "The paper’s own example has batch norm behind every convolution: see figure 10.",
    )


def by_updates_and_flops(what: str, grown: str, scratch: str) -> Callable[[Numbers], Claim | None]:
    def judge(numbers: Numbers) -> Claim | None:
        results = numbers.results
        if grown not in results or scratch not in results:
            return None
        said, short, signs = [], [], []
        final = late_mean(results, scratch)
        for target, what_for in ((65.0, "65 %"), (68.0, "68 %"), (final, f"scratch’s final {final:.1f} %")):
            rows = [cost(results, grown, scratch, target, "", "nothing", axis) for axis in ("epochs", "flops")]
            if any(row is None or row.saving is None or row.reached < row.n for row in rows):
                continue
            savings = [row.saving for row in rows if row and row.saving]
            said.append(f"to {what_for}: {share(savings[0], 'epochs')}; {share(savings[1])}")
            short.append(f"{fewer(savings[1].value)}{'' if short else ' FLOPs'} to {what_for}")
            signs.append((savings[0].value <= 0 or not savings[0].clear, savings[1].clear and savings[1].value > 0))
        if not said:
            return None
        cheaper = sum(flops for _, flops in signs)
        slower = sum(epochs for epochs, _ in signs)
        return Claim(
            "§6.2, figure 8",
            f"{what} in mid-training is slower by updates and faster by FLOPs.",
            f"{', '.join(short)}; fewer epochs to {len(signs) - slower or 'none'} of them.",
            AGREES if all(a and b for a, b in signs) else PARTLY if cheaper else DIFFERS,
            "From nothing, "
            + "; ".join(said)
            + ". Both arms drop their rate at the epoch of the growth, where accuracy leaps; the "
            "small network gets there for less. A scratch network whose rate dropped earlier would be the fairer rival.",
        )

    return judge


def similar_end(numbers: Numbers) -> Claim | None:
    pairs = [
        pair
        for grown, scratch in (("FTT-R2WiderR", "FTT-RandomWide"), ("FTT-R2DeeperR", "FTT-RandomDeep"))
        if (pair := numbers.pair(grown, scratch))
    ]
    if not pairs:
        return None
    worse = [pair for pair in pairs if pair.late.clear and pair.late.value < 0]
    return Claim(
        "§6.2, §7",
        "Grown in mid-training, networks reach similar performance with less compute.",
        "End against scratch: " + "; ".join(f"{look(pair.arm).label} {points(pair.late)}" for pair in pairs) + ".",
        AGREES if not worse else PARTLY if len(worse) < len(pairs) or max(-p.late.value for p in worse) < 1.5 else DIFFERS,
    )


def appendix_b(numbers: Numbers) -> Claim | None:
    """The figure's growth, at update 4,500 of 6,000; the earlier ones are in the explanation."""
    own = "APB3-Scratch" in numbers.results
    prefix, late = ("APB3", "@4500") if own else ("APB", "")
    said, holds, others = [], [], []
    for what, arm in (("widened", f"{prefix}-R2WiderR"), ("deepened", f"{prefix}-R2DeeperR")):
        for name in (f"{arm}{late}", f"{arm}@3000", f"{arm}@1500"):
            row, pair = numbers.cost(name, "70 %", "nothing"), numbers.pair(name, f"{prefix}-Scratch")
            if row is None or pair is None:
                continue
            saving = row.saving if row.reached == row.n else None
            reach = share(saving) if saving else f"70 % in {row.reached} of {row.n} seeds"
            if name != f"{arm}{late}":
                others.append(f"{what} at update {name.partition('@')[2]}: {reach}, end {points(pair.late)}")
                continue
            holds += [saving is not None and saving.clear and saving.value > 0, pair.late.clear and pair.late.value < 0]
            said.append(f"{what} {reach}, end {points(pair.late)}")
    if not said:
        return None
    return Claim(
        "Appendix B",
        "Half the network, all of it for the last quarter of the updates: fewer FLOPs to 70 % (widened 46 %, read off the "
        "plot), a lower end.",
        "Against scratch, from nothing: " + "; ".join(said) + ".",
        AGREES if all(holds) else PARTLY if any(holds) else DIFFERS,
        "; ".join(others)
        + (
            ". Network, rates and schedule are those of the author’s code."
            if own
            else ". The appendix names neither sizes nor rates, and ours are a guess. All arms cross 70 % when "
            "their rate drops: what is saved is the cost of the updates before."
        ),
    )


CLAIMS: tuple[tuple[Callable[[Numbers], Claim | None], str], ...] = (  # and the files that they read
    (exact, "*.json"),
    (finals, "NCT-*.json"),
    (at_least_scratch, "NCT-*.json, FTT-Random*.json"),
    (no_skips, "NCT-Net2WiderNet*.json, NCT-R2WiderR.json"),
    (overfit, "OF-*.json"),
    (by_updates_and_flops("Deepening", "FTT-R2DeeperR", "FTT-RandomDeep"), "FTT-R2DeeperR.json, FTT-RandomDeep.json"),
    (by_updates_and_flops("Widening", "FTT-R2WiderR", "FTT-RandomWide"), "FTT-R2WiderR.json, FTT-RandomWide.json"),
    (similar_end, "FTT-*.json"),
    (large_values, "VIZ-R2R*.json"),
    (he, "BI-*.json"),
    (appendix_b, "APB*.json"),
    *((judge, "filters.safetensors") for judge in FILTER_CLAIMS),
)


def claims(numbers: Numbers) -> list[Claim]:
    """None for a run on a part of the images."""
    if any(", the first" in content["data"] for content in numbers.results.values()):
        return []
    made = ((judge(numbers), results) for judge, results in CLAIMS)
    return [replace(claim, results=results) for claim, results in made if claim is not None]
