"""The paper's claims, and whether they hold here.

Claims and explanations are fixed text; the result here and the verdict are computed. A verdict needs a difference whose 95 %
interval excludes zero; the paper's accuracies have the error of one run on 1,000 images (`tables.beside_paper`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from experiments.pages.looks import look
from experiments.reading.filter_changes import Changes, changes
from experiments.reading.rivals import against_fairest
from experiments.reading.tables import Numbers, cost, late_mean, paired
from experiments.reading.words import plain, points, share, signed, tiny, verdict

AGREES, DIFFERS, PARTLY, MISSING = "agrees", "differs", "in part", "not run"


@dataclass(frozen=True)
class Claim:
    place: str
    paper: str
    ours: str
    verdict: str
    why: str = ""
    results: str = ""  # the files that it is computed from


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
        f"{len(near)} of {len(rows)} within the errors" + (f"; outside: {', '.join(far)}." if far else "."),
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
        f"Against the fairest scratch, last ten epochs: {said}." + (f" Against the paper’s: {beside}." if beside else ""),
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
        "beside them. Batch norm behind every convolution also removes the scale of its weights.",
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
            short.append(f"{signed(-100 * savings[1].value, 0)} % to {what_for}")
            signs.append((savings[0].value <= 0 or not savings[0].clear, savings[1].clear and savings[1].value > 0))
        if not said:
            return None
        cheaper = sum(flops for _, flops in signs)
        slower = sum(epochs for epochs, _ in signs)
        return Claim(
            "§6.2, figure 8",
            f"{what} in mid-training is slower by updates and faster by FLOPs.",
            f"FLOPs {', '.join(short)}; faster by epochs to {len(signs) - slower or 'none'} of them.",
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
    own = "APB3-Scratch" in numbers.results
    prefix = "APB3" if own else "APB"
    said, savings = [], []
    for what, arm in (("widening", f"{prefix}-R2WiderR"), ("deepening", f"{prefix}-R2DeeperR")):
        for name in (f"{arm}@4500", arm, f"{arm}@3000", f"{arm}@1500"):
            row, end = numbers.cost(name, "70 %", "nothing"), numbers.end(name)
            if row is None or end is None:
                continue
            whole = row.saving is not None and row.reached == row.n
            savings += [row.saving] if row.saving is not None and whole else []
            reach = share(row.saving) if row.saving is not None and whole else f"{row.reached} of {row.n} seeds"
            said.append(f"{what} at update {name.partition('@')[2] or '4500'}: {reach}, end {end.mean:.1f} %")
    if not said:
        return None
    best = max(savings, key=lambda one: one.value, default=None)
    return Claim(
        "Appendix B",
        "Half the width, all of it for the last quarter of the updates: 46 % fewer FLOPs to 70 % (read off the plot), a "
        "lower end.",
        "To 70 % from nothing, at best " + (share(best) if best else "not reached in all seeds") + ".",
        DIFFERS if best is None or best.value <= 0 else PARTLY,
        "; ".join(said)
        + (
            ". Network, rates and schedule are those of the author’s code."
            if own
            else ". The appendix names neither sizes nor rates, and ours are a guess. All arms cross 70 % when "
            "their rate drops: what is saved is the cost of the updates before."
        ),
    )


def filters(judge: Callable[[dict[str, Changes]], tuple[str, str, str, str]]) -> Callable[[Numbers], Claim | None]:
    def claim(numbers: Numbers) -> Claim | None:
        found = changes(numbers.filters)
        said, *_ = judge({}) if not {"VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph"} <= set(found) else judge(found)
        if not {"VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph"} <= set(found):
            return Claim("§5.4, figure 4", said, "The filter runs are not among these results.", MISSING)
        return Claim("§5.4, figure 4", *judge(found))

    return claim


def persist(found: dict[str, Changes]) -> tuple[str, str, str, str]:
    said = "The first 16 filters tend to be present still after widening and training."
    rows = [found[arm] for arm in ("VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph") if arm in found]
    values = ", ".join(f"{look(row.arm).label} {row.kept.value:.2f}" for row in rows)
    holds = [row.kept.low > 0.5 and row.kept.low > row.unrelated.high for row in rows]
    why = "Unrelated filters have " + ", ".join(f"{row.unrelated.value:.2f}" for row in rows) + "; intervals: " if rows else ""
    why += "; ".join(f"{look(row.arm).label} {plain(row.kept)}" for row in rows)
    return (
        said,
        f"Mean cosine of a first filter before and at the end: {values}.",
        AGREES if all(holds) else PARTLY,
        why.replace("-", "−"),
    )


def net2net_shape(found: dict[str, Changes]) -> tuple[str, str, str, str]:
    said = "Net2Net’s new filters keep their orientation; their colours change."
    if not found:
        return said, "", "", ""
    own, other = found["VIZ-Net2Net"], found["VIZ-R2R"]
    shape, colour = own.pattern.low > other.pattern.high, own.colour.high < 0.8
    return (
        said,
        f"Pattern kept {own.pattern.value:.2f} (R2R’s new filters {other.pattern.value:.2f}); colour kept "
        f"{own.colour.value:.2f}.",
        AGREES if shape and colour else PARTLY if shape or colour else DIFFERS,
        f"|cos| after the growth and at the end. Net2Net: pattern {plain(own.pattern)}, colour {plain(own.colour)}; R2R: "
        f"pattern "
        f"{plain(other.pattern)}, colour {plain(other.colour)}. Colours are kept too here.",
    )


def symmetry(found: dict[str, Changes]) -> tuple[str, str, str, str]:
    said = "R2R’s new filters learn different orientations: their symmetry is broken without noise."
    if not found:
        return said, "", "", ""
    own = found["VIZ-R2R"]
    partly = own.twins.low > own.others.high
    return (
        said,
        f"Twins, equal at the growth, end at cosine {own.twins.value:.2f}; filters of different pairs at "
        f"{own.others.value:.2f}.".replace("-", "−"),
        AGREES if own.twins.high < 0.9 else DIFFERS,
        f"Twins {plain(own.twins)}" + (": broken, but former twins stay partly alike." if partly else "."),
    )


def small_weights(found: dict[str, Changes]) -> tuple[str, str, str, str]:
    said = "Network Morphism’s new filters are noisy or have small weights."
    if not found:
        return said, "", "", ""
    own = found.get("VIZ-NetMorph(writers)") or found["VIZ-NetMorph"]
    smaller, noisier = own.size.high < 1, own.rough_new.low > own.rough_old.high
    return (
        said,
        f"{look(own.arm).label}: size {own.size.value:.2f} of the first filters’; high-frequency share "
        f"{own.rough_new.value:.2f} against "
        f"{own.rough_old.value:.2f}.",
        AGREES if smaller or noisier else DIFFERS,
        "; ".join(f"{look(arm).label}: size {plain(row.size)}" for arm, row in found.items())
        + ". "
        + (
            "Zero writers, as in the paper’s figure."
            if own.arm.endswith("(writers)")
            else "Zero readers; the paper’s figure has zero writers."
        ),
    )


def large_scale(numbers: Numbers) -> Claim | None:
    found = changes(numbers.filters)
    if "VIZ-R2R(scale10)" not in found or "VIZ-R2R" not in found:
        return None
    own, usual = found["VIZ-R2R(scale10)"], found["VIZ-R2R"]
    return Claim(
        "§5.4",
        "Initial values of a larger scale lose the first 16 filters.",
        f"Mean cosine before and at the end: {own.kept.value:.2f} at ten times the scale, {usual.kept.value:.2f} as usual.",
        AGREES if own.kept.high < 0.5 else PARTLY if own.kept.high < usual.kept.low else DIFFERS,
        "; ".join(f"{look(arm).label} {plain(row.kept)}" for arm, row in found.items() if arm.startswith("VIZ-R2R")),
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
    (he, "BI-*.json"),
    (appendix_b, "APB*.json"),
    *((filters(judge), "filters.safetensors") for judge in (persist, net2net_shape, symmetry, small_weights)),
    (large_scale, "filters.safetensors"),
)


def claims(numbers: Numbers) -> list[Claim]:
    """None for a run on a part of the images."""
    if any(", the first" in content["data"] for content in numbers.results.values()):
        return []
    made = ((judge(numbers), results) for judge, results in CLAIMS)
    return [replace(claim, results=results) for claim, results in made if claim is not None]
