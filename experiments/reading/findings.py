"""What came out, in words. Every number and every verdict is computed from the results; only explanations are fixed text.

A difference is called one when its 95 % interval over seeds leaves zero out; otherwise the words are "no clear difference".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from experiments.pages.looks import look
from experiments.reading.curves import Estimate
from experiments.reading.diversity import ahead
from experiments.reading.tables import TARGETS, Cost, Numbers, paired


@dataclass(frozen=True)
class Finding:
    """`figure` is its number in large, with what it counts behind a bar.

    `tone` is "good" where growth paid, "bad" where it did not, "plain" otherwise.
    """

    figure: str
    title: str
    text: str
    tone: str = "plain"


def signed(number: float, digits: int = 1) -> str:
    """With its sign, and no minus before nothing."""
    return f"{round(number, digits) + 0.0:+.{digits}f}".replace("-", "−")


def interval(one: Estimate) -> str:
    if one.n < 2:
        return "[one seed]"
    return f"[{signed(one.low)}, {signed(one.high)}]"


def points(one: Estimate) -> str:
    """+3.5 points [+2.0, +4.7]"""
    return f"{signed(one.value)} points {interval(one)}"


def verdict(one: Estimate, more: str, less: str) -> str:
    """`more` or `less` with the size of the difference, where there is one."""
    if not one.clear:
        return f"no clear difference ({points(one)})"
    return f"{abs(one.value):.1f} points {more if one.value > 0 else less} {interval(one)}"


def share(one: Estimate, what: str = "FLOPs") -> str:
    """27 % fewer FLOPs [3, 45]"""
    low, high = (one.low, one.high) if one.value >= 0 else (-one.high, -one.low)
    ends = ", ".join(f"{round(100 * end) + 0.0:.0f}" for end in (low, high))
    text = f"{abs(100 * one.value):.0f} % {'fewer' if one.value >= 0 else 'more'} {what} [{ends}]"
    return text.replace("-", "−") + ("" if one.clear else ", no clear difference")


def exactness(numbers: Numbers) -> Finding | None:
    exact = [row for row in numbers.growths if row.preserving and row.drop is not None]
    padded = [row for row in numbers.growths if not row.preserving and row.before is not None]
    if not exact:
        return None
    moved = max(abs(row.drop.value) for row in exact if row.drop)
    count, error = sum(row.n for row in exact), max(row.error for row in exact)
    title = "A growth loses nothing" if moved < 0.1 else f"Growths moved accuracy by up to {moved:.1f} points"
    text = (
        f"{count} function-preserving growths: outputs moved by {error:.0e} of the largest one at most, the mean accuracy of "
        f"an arm by {moved:.2f} points at most."
    )
    if padded:
        worst = max(padded, key=lambda row: (row.before or 0) - row.after)
        text += f" Random padding, for comparison, took accuracy from {worst.before:.0f} % to {worst.after:.0f} % at a stroke."
    return Finding(f"± {moved:.2f}|points at the growth", title, text, "good" if moved < 0.1 else "bad")


def endings(numbers: Numbers) -> Finding | None:
    """Where students end, against scratch, against a scratch whose rate drops too, and against random padding."""
    grown, scratch, fair, padding = "NCT-R2WiderR", "NCT-RandomWide", "FTT-RandomWide", "NCT-RandPadWiden"
    pair, end = numbers.pair(grown, scratch), numbers.end(grown)
    base = numbers.end(scratch)
    if pair is None or end is None or base is None:
        return None
    text = (
        f"In the paper's convergence test R2WiderR ends at {end.mean:.1f} ± {end.sd:.1f} %, the same network from scratch at "
        f"{base.mean:.1f} ± {base.sd:.1f} %: {points(pair.end)}."
    )
    title = "A student ends above scratch" if pair.end.clear and pair.end.value > 0 else "A student does not end above scratch"
    honest, other = paired(numbers.results, grown, fair, "fair"), numbers.end(fair)
    if honest is not None and other is not None:
        text += (
            " But the student's rate is a fifth of that, and scratch keeps the high one to its end, as the table has it. "
            f"With the rate dropped early (and the weight decay of the grown arms) scratch ends at {other.mean:.1f} %, and "
            f"against that it is {points(honest.end)}"
        )
        text += ". Most of the lead is the learning rate's." if abs(honest.end.value) < abs(pair.end.value) / 2 else "."
        if pair.end.value > 0 and abs(honest.end.value) < abs(pair.end.value) / 2:
            title += ", mostly by its lower rate"
    padded = numbers.pair(grown, padding)
    if padded is not None:
        text += f" Against random padding: {verdict(padded.end, 'better', 'worse')} at the end."
    shown = honest.end if honest is not None else pair.end
    return Finding(f"{signed(shown.value)}|points at the end", title, text)


def grown_at(numbers: Numbers, arm: str) -> float:
    """The epoch at which an arm of two stages grows."""
    return float(numbers.results[arm]["arm"]["stages"][0]["epochs"])


def best_target(numbers: Numbers, grown: str, scratch: str) -> tuple[Cost, Cost] | None:
    """The highest fixed accuracy that all seeds of both arms reach, and that both hold at their ends (a noisy curve may touch
    another): its cost from nothing, and under reuse."""
    ends = [numbers.end(grown), numbers.end(scratch)]
    held = min((row.late for row in ends if row is not None), default=0.0)
    for target in (target for target in reversed(TARGETS) if target <= held):
        rows = [numbers.cost(grown, f"{target:g} %", account) for account in ("nothing", "reuse")]
        base = numbers.cost(scratch, f"{target:g} %", "nothing")
        if base is None or base.reached < base.n or rows[0] is None or rows[1] is None or rows[0].reached < rows[0].n:
            continue
        if rows[0].saving is not None and rows[1].saving is not None:
            return rows[0], rows[1]
    return None


def speed(what: str, grown: str, scratch: str) -> Callable[[Numbers], Finding | None]:
    """Growing in mid-training: compute to an accuracy, and where it ends."""

    def find(numbers: Numbers) -> Finding | None:
        rows, pair = best_target(numbers, grown, scratch), numbers.pair(grown, scratch)
        if rows is None or pair is None or rows[0].saving is None or rows[1].saving is None:
            return None
        nothing, reuse = rows[0].saving, rows[1].saving
        ends = verdict(pair.late, "higher", "lower")
        pays = nothing.clear and nothing.value > 0
        title = (
            f"{what} in mid-training: {abs(100 * nothing.value):.0f} % {'fewer' if nothing.value > 0 else 'more'} FLOPs to "
            f"{rows[0].what}"
            + (f", but an end {abs(pair.late.value):.1f} points lower" if pair.late.clear and pair.late.value < 0 else "")
        )
        text = (
            f"Grown at epoch {grown_at(numbers, grown):g}, {look(grown).label} reaches {rows[0].what} with {share(nothing)} "
            f"than from scratch when the small network's training counts (from nothing), {share(reuse)} when it does not "
            f"(reuse). Over its last ten epochs: {ends}."
        )
        final = numbers.cost(grown, "scratch's final", "nothing")
        if final is not None and final.saving is not None:
            text += f" To where scratch ends ({final.target:.1f} %): {share(final.saving)}, from nothing."
        if what == "Widening":
            text += (
                " Every arm's rate drops at that epoch, and accuracy leaps there: part of the saving is that the small "
                "network gets to that epoch for less."
            )
        lower = pair.late.clear and pair.late.value < 0
        figure = f"{signed(-100 * nothing.value, 0)} %|FLOPs to {rows[0].what}, from nothing"
        return Finding(figure, title, text, "bad" if not pays else "plain" if lower else "good")

    return find


def reuse(numbers: Numbers) -> Finding | None:
    """A trained small network is there: what does the way to the large one's accuracy cost?"""
    parts, saved, counted, padded = [], [], [], []
    for grown, padding, word in (
        ("NCT-R2WiderR", "NCT-RandPadWiden", "Widened"),
        ("NCT-R2DeeperR", "NCT-RandPadDeeper", "Deepened"),
    ):
        there, nothing = (numbers.cost(grown, "scratch's final, rate dropped", account) for account in ("reuse", "nothing"))
        if there is None or nothing is None or there.saving is None or nothing.saving is None:
            continue
        saved.append(there.saving)
        counted.append(nothing.saving)
        parts.append(
            f"{word}, {there.target:.1f} % takes {share(there.saving)} under reuse; with the teacher's own training counted, "
            f"{share(nothing.saving)}."
        )
        random = numbers.cost(padding, "scratch's final, rate dropped", "reuse")
        padded += [f"{100 * random.saving.value:.0f} %"] if random and random.saving else []
    if not parts:
        return None
    pays = all(one.clear and one.value > 0 for one in saved)
    loses = all(one.clear and one.value < 0 for one in counted)
    text = "To where the network from scratch ends when its rate drops like the students': " + " ".join(parts)
    text += f" Random padding saves {' and '.join(padded)} under reuse." if padded else ""
    if pays and loses:
        text += " So growth pays when a small network is there already, not when one is trained this long for the purpose."
    text += (
        " The students' rate drops to a fifth at the growth, and no arm drops it without one: the drop has its part in this."
    )
    title = f"On the paper's schedule, with a trained small network: {100 * min(one.value for one in saved):.0f} % fewer FLOPs"
    title = title if pays else "A trained small network did not clearly help"
    return Finding(
        f"{signed(-100 * min(one.value for one in saved), 0)} %|FLOPs, reuse", title, text, "good" if pays else "bad"
    )


def pairs_explode(numbers: Numbers) -> Finding | None:
    ours, theirs = numbers.growth("NCT-R2DeeperR"), numbers.growth("NCT-R2DeeperR(paper)")
    if ours is None or theirs is None:
        return None
    jump, calm = theirs.worst_loss - theirs.first_loss, ours.worst_loss - ours.first_loss
    return Finding(
        f"{theirs.first_loss:.1f} → {theirs.worst_loss:.1f}|loss, paired",
        "Exact is not enough: the step after counts" if jump > 2 * abs(calm) else "Both ways to close a block are calm",
        "A new block that ends in a batch norm can be closed by paired weights, as the paper writes, or by γ = 0, as outgrow "
        f"does. Both are exact. Within ten steps the loss goes from {theirs.first_loss:.2f} to {theirs.worst_loss:.2f} with "
        f"pairs, from {ours.first_loss:.2f} to {ours.worst_loss:.2f} with γ = 0; an epoch later they have "
        f"{theirs.one_epoch:.1f} % and {ours.one_epoch:.1f} %. The library's default is γ = 0.",
    )


def overfitted(numbers: Numbers) -> Finding | None:
    teacher, scratch = numbers.pair("OF-Student", "OF-Teacher"), numbers.pair("OF-Student", "OF-Rand")
    if teacher is None or scratch is None:
        return None
    stuck = not (teacher.late.clear and teacher.late.value > 0)
    return Finding(
        f"{signed(scratch.late.value)}|points against scratch",
        "An overfitted network is not worth growing" if stuck else "A student of an overfitted teacher gains",
        "The student of a teacher without weight decay, over the last ten epochs: against its teacher "
        f"{verdict(teacher.late, 'higher', 'lower')}; against the same network from scratch "
        f"{verdict(scratch.late, 'higher', 'lower')}.",
        "bad" if stuck else "good",
    )


def initialised(numbers: Numbers) -> Finding | None:
    he, std, pair = numbers.growth("BI-He"), numbers.growth("BI-Std"), numbers.pair("BI-Std", "BI-He")
    if he is None or std is None or pair is None:
        return None
    gap = std.one_epoch - he.one_epoch
    return Finding(
        f"{signed(pair.late.value)}|points, matched against He",
        "He initialisation did no harm here" if abs(gap) < 1 else "The scale of new weights matters",
        f"One epoch after the growth: {std.one_epoch:.1f} % with the deviation of the weights that new ones join, "
        f"{he.one_epoch:.1f} % with He's. Matched against He over the last ten epochs: "
        f"{verdict(pair.late, 'better', 'worse')}.",
    )


def filters(numbers: Numbers) -> Finding | None:
    ends = {row.arm: row for row in numbers.diversity if row.when == "end"}
    if not ends:
        return None
    best = max(ends.values(), key=lambda row: row.diversity)
    clear = all(ahead(best, row) for row in ends.values() if row is not best)
    told = "; ".join(
        f"{look(row.arm).label}: diversity {row.diversity:.2f} ± {row.diversity_sd:.2f}, symmetry "
        f"{row.symmetry or math.nan:.2f}"
        for row in ends.values()
    )
    return Finding(
        f"{best.diversity:.2f}|diversity",
        f"{look(best.arm).label} ends with the most diverse filters"
        if clear
        else "No method ends with clearly more diverse filters",
        f"At the end of training, over seeds: {told}.",
    )


FINDINGS: tuple[Callable[[Numbers], Finding | None], ...] = (
    exactness,
    reuse,
    speed("Widening", "FTT-R2WiderR", "FTT-RandomWide"),
    speed("Deepening", "FTT-R2DeeperR", "FTT-RandomDeep"),
    endings,
    pairs_explode,
    overfitted,
    initialised,
    filters,
)


def findings(numbers: Numbers) -> list[Finding]:
    """All that the results at hand allow to say."""
    return [found for find in FINDINGS if (found := find(numbers)) is not None]


def amount(number: float, unit: str = "") -> str:
    """1.2e16 → 12 P"""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".strip()


def duration(seconds: float) -> str:
    return f"{seconds / 60:,.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def lede(numbers: Numbers) -> str:
    """What was done, in two sentences."""
    done, any_result = numbers.work, next(iter(numbers.results.values()))
    seeds = sorted({len(content["seeds"]) for content in numbers.results.values()})
    each = f"{' or '.join(map(str, seeds))} seeds each" if seeds != [1] else "one seed each"
    return (
        "The experiments of “Towards a More Complete Theory of Function Preserving Transforms”, run again on "
        f"{any_result['data']}: "
        f"{done.arms} arms, {each}, {done.epochs:,.0f} epochs of training and {done.growths} growths, "
        f"{amount(done.flops, 'FLOP')} in {duration(done.seconds)} of training on one {any_result['device']}. Every growth is "
        "a call of outgrow’s public functions."
    )


def summary(numbers: Numbers) -> str:
    """The outcome in a few lines, good and bad."""
    said = []
    exact = exactness(numbers)
    if exact is not None and exact.tone == "good":
        said.append("At the moment it happens, growth changes nothing.")
    there = numbers.cost("NCT-R2WiderR", "scratch's final, rate dropped", "reuse")
    if there is not None and there.saving is not None:
        said.append(
            "On the paper's schedules: where a trained small network is there already, a widened one, its rate dropped, "
            f"reaches scratch's accuracy with {share(there.saving)}"
        )
        padding = numbers.cost("NCT-RandPadWiden", "scratch's final, rate dropped", "reuse")
        said[-1] += f" (by random padding: {share(padding.saving)})." if padding is not None and padding.saving else "."
    rows, ends = best_target(numbers, "FTT-R2WiderR", "FTT-RandomWide"), numbers.pair("FTT-R2WiderR", "FTT-RandomWide")
    if rows is not None and rows[0].saving is not None and ends is not None:
        said.append(
            f"Where the small one must be trained first, widening it early takes {share(rows[0].saving)} to {rows[0].what}; "
            f"its end, against scratch: {verdict(ends.late, 'higher', 'lower')}."
        )
    padded = numbers.pair("NCT-R2WiderR", "NCT-RandPadWiden")
    if padded is not None:
        said.append(f"Against random padding, at the end: {verdict(padded.late, 'higher', 'lower')}.")
    return " ".join(said)
