"""The findings of the paper's own experiments, as cards. Values and verdicts are computed; only explanations are fixed text.

A difference is called one when its 95 % interval over seeds excludes zero; otherwise the words are "no clear difference".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from experiments.pages.looks import look
from experiments.reading.curves import Estimate, Results, student
from experiments.reading.filter_changes import changes
from experiments.reading.rivals import against_fairest
from experiments.reading.tables import TARGETS, Cost, Numbers, cost, last
from experiments.reading.words import amount, duration, plain, points, share, signed, tiny, verdict


@dataclass(frozen=True)
class Strip:
    """A difference by budget: ▲ where it is clearly above zero, ▼ below, · where it is not settled."""

    name: str
    cells: Mapping[str, Estimate]
    short: str = ""  # beside the title of its finding


@dataclass(frozen=True)
class Finding:
    """`figure` is its value in large, with what it counts behind a bar; `text` is what is folded away.

    Lines of `text` are items of a list. `strips` stand beside the title, and in a table with `more`.

    `tone` is "good" where growth paid, "bad" where it did not, "plain" otherwise.
    """

    figure: str
    title: str
    text: str
    tone: str = "plain"
    strips: tuple[Strip, ...] = ()
    more: tuple[Strip, ...] = ()


def exactness(numbers: Numbers) -> Finding | None:
    rows = [row for row in numbers.growths if row.preserving and row.drop is not None]
    padded = [row for row in numbers.growths if not row.preserving and row.before is not None]
    if not rows:
        return None
    moved = max(abs(row.drop.value) for row in rows if row.drop)
    count, error = sum(row.n for row in rows), max(row.error for row in rows)
    title = "The growth itself changes nothing" if moved < 0.1 else f"Growths moved accuracy by up to {moved:.1f} points"
    text = (
        f"{count} function-preserving growths: outputs moved by {tiny(error)} of the largest one at most, the mean accuracy of "
        f"an arm by {moved:.2f} points at most."
    )
    if padded:
        worst = max(padded, key=lambda row: (row.before or 0) - row.after)
        text += f" Random padding, for comparison, took accuracy from {worst.before:.0f} % to {worst.after:.0f} % at a stroke."
    return Finding(f"± {moved:.2f}|points at the growth", title, text, "good" if moved < 0.1 else "bad")


def steps_after(numbers: Numbers) -> Finding | None:
    """What happens after an exact growth, with an optimizer that is made again: falls of accuracy and jumps of the loss."""
    rows = [row for row in numbers.growths if row.preserving and row.before is not None]
    fell = [row for row in rows if row.before is not None and row.one_epoch < row.before - 1]
    jumped = [row for row in rows if row.soon is not None and row.soon > 1.1]
    if not rows:
        return None
    if not fell and not jumped:
        return Finding(
            "0|arms fall after it", "The epoch after the growth loses nothing", "No arm falls by a point or more.", "good"
        )
    usual = [row for row in jumped if "(scale" not in row.arm]  # scales that were chosen in order to do harm head no card
    worst = max(usual or jumped or rows, key=lambda row: row.soon or 0.0)
    fallen = [f"{row.arm} {row.before:.1f} → {row.one_epoch:.1f} %" for row in fell]
    loud = [f"{row.arm} × {row.soon:.1f}" for row in jumped]
    text = "Arms whose accuracy is a point or more lower at the next evaluation: " + (", ".join(fallen) or "none") + "."
    text += " Training loss over the next 20 steps, relative to the 30 before, above 1.1: " + (", ".join(loud) or "none") + "."
    text += " The paper’s runs make a fresh Adam at the growth."
    carried = {row.arm: row for row in rows if row.arm.endswith("(carried)") and row.soon is not None}
    pairs = [(numbers.growth(arm.removesuffix("(carried)")), row) for arm, row in carried.items()]
    said = [
        f"{row.arm.removesuffix('(carried)')} × {row.soon:.1f} instead of {own.soon:.1f}"
        for own, row in pairs
        if own and own.soon
    ]
    text += f" With its state carried: {', '.join(said)}." if said else " A carried state is the library’s default."
    figure = f"× {worst.soon:.0f}|loss, {worst.arm}" if worst.soon else f"{len(fell)}|arms fall"
    return Finding(
        figure, f"Exact is not enough: {len({*fell, *jumped})} of {len(rows)} arms lose something after it", text, "bad"
    )


def endings(numbers: Numbers) -> Finding | None:
    """Where students end, against the fairest scratch and against random padding."""
    pair = against_fairest(numbers.results, "NCT-R2WiderR")
    end = numbers.end("NCT-R2WiderR")
    if pair is None or end is None:
        return None
    rival = numbers.end(pair.against)
    title = {
        (True, True): "A widened student ends above the fairest scratch",
        (True, False): "A widened student ends below the fairest scratch",
    }.get((pair.late.clear, pair.late.value > 0), "A widened student ends where the fairest scratch ends")
    theirs = f"{pair.against} {rival.late:.1f} %" if rival else pair.against
    text = f"R2WiderR {end.late:.1f} %, {theirs}: {points(pair.late)} over the last ten epochs."
    own = numbers.pair("NCT-R2WiderR", "NCT-RandomWide")
    if own is not None and pair.against != "NCT-RandomWide":
        text += (
            f" Against the scratch that keeps its high rate to the end: {points(own.late)}; that lead is the learning rate’s."
        )
    padded = numbers.pair("NCT-R2WiderR", "NCT-RandPadWiden")
    if padded is not None:
        text += f" Against random padding: {verdict(padded.late, 'better', 'worse')}."
    return Finding(f"{signed(pair.late.value)}|points at the end", title, text)


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
    """Growth in mid-training: compute to an accuracy, and where it ends."""

    def find(numbers: Numbers) -> Finding | None:
        rows, pair = best_target(numbers, grown, scratch), numbers.pair(grown, scratch)
        if rows is None or pair is None or rows[0].saving is None or rows[1].saving is None:
            return None
        nothing, reuse = rows[0].saving, rows[1].saving
        pays, lower = nothing.clear and nothing.value > 0, pair.late.clear and pair.late.value < 0
        more = "fewer" if nothing.value > 0 else "more"
        title = f"{what} in mid-training: {abs(100 * nothing.value):.0f} % {more} FLOPs to {rows[0].what}"
        title += f", an end {abs(pair.late.value):.1f} points lower" if lower else ""
        text = (
            f"From nothing {share(nothing)}, under reuse {share(reuse)}. End against scratch: "
            f"{verdict(pair.late, 'higher', 'lower')}."
        )
        final = numbers.cost(grown, "scratch's final", "nothing")
        if final is not None and final.saving is not None:
            text += f" To where scratch ends ({final.target:.1f} %): {share(final.saving)}, from nothing."
        text += " All arms drop their rate at that epoch; part of the saving is that the small network gets there for less."
        figure = f"{signed(-100 * nothing.value, 0)} %|FLOPs to {rows[0].what}, from nothing"
        return Finding(figure, title, text, "bad" if not pays else "plain" if lower else "good")

    return find


def reuse(numbers: Numbers) -> Finding | None:
    """The paper's schedule with a trained small network: compute to where scratch ends, and the part of the rate drop."""
    goal = "scratch's final, rate dropped"
    found = {arm: numbers.cost(arm, goal, "reuse") for arm in ("NCT-R2WiderR", "NCT-R2DeeperR")}
    saved = {arm: row for arm, row in found.items() if row is not None and row.saving is not None}
    if not saved:
        return None
    parts, least = [], min(row.saving.value for row in saved.values() if row.saving)
    for arm, row in saved.items():
        assert row.saving is not None
        whole = numbers.cost(arm, goal, "nothing")
        counted = f"; with the teacher’s training counted {share(whole.saving)}" if whole and whole.saving else ""
        parts.append(f"{look(arm).label} to {row.target:.1f} %: {share(row.saving)}{counted}.")
    for padding in ("NCT-RandPadWiden", "NCT-RandPadDeeper"):
        other = numbers.cost(padding, goal, "reuse")
        parts += [f"Random padding ({padding}): {share(other.saving)}."] if other and other.saving else []
    controls = {"NCT-R2WiderR": "NCT-WidenTeacher(dropped)", "NCT-R2DeeperR": "NCT-DeepenTeacher(dropped)"}
    dropped = {arm: controls[arm] for arm in saved if controls[arm] in numbers.results}
    if dropped:
        parts += [not_grown(numbers, saved[arm], control) for arm, control in dropped.items()]
    else:
        parts.append(
            "The rate drops to a fifth at the growth, and no arm here drops it without one: the drop has its part in this."
        )
    pays = all(row.saving.clear and row.saving.value > 0 for row in saved.values() if row.saving)
    alone = [as_few(saved[arm], dropped_only(numbers, saved[arm], control)) for arm, control in dropped.items()]
    why = "the same without growing: it is the rate drop" if alone and all(alone) else "the rate drop included"
    title = f"On the paper’s schedule, with a trained small network: {100 * least:.0f} % fewer FLOPs, {why}"
    return Finding(
        f"{signed(-100 * least, 0)} %|FLOPs, reuse",
        title if pays else "A trained small network did not clearly help",
        " ".join(parts),
        "plain" if pays else "bad",
    )


def dropped_only(numbers: Numbers, row: Cost, control: str) -> Cost | None:
    """What the small network needs for the same accuracy that is not grown, but whose rate drops too."""
    return cost(numbers.results, control, row.against, row.target, row.what, "reuse", "flops")


def as_few(row: Cost, other: Cost | None) -> bool:
    """Whether another one saves as much in all seeds, to two per cent."""
    if row.saving is None or other is None or other.saving is None or other.reached < other.n:
        return False
    return other.saving.value > row.saving.value - 0.02


def not_grown(numbers: Numbers, row: Cost, control: str) -> str:
    """What the rate drop does by itself."""
    own = dropped_only(numbers, row, control)
    reached = "" if own is None else f"{own.reached} of {own.n} seeds reach {row.target:.1f} %"
    saved = f" with {share(own.saving)}" if own is not None and own.saving is not None else ""
    end = numbers.end(control)
    return f"Not grown, but with the rate dropped ({control}): {reached}{saved}; it ends at {end.late if end else 0:.1f} %."


def over_last(results: Results, one: str, other: str, epochs: int) -> Estimate | None:
    """The mean difference of two arms over their last epochs, seed by seed."""
    if one not in results or other not in results or results[one]["seeds"] != results[other]["seeds"]:
        return None
    return student(list(np.subtract(last(results, one, epochs), last(results, other, epochs))))


def pairs_explode(numbers: Numbers) -> Finding | None:
    """γ = 0 against pairs: the first steps, and the whole run."""
    ours, theirs = numbers.growth("NCT-R2DeeperR"), numbers.growth("NCT-R2DeeperR(paper)")
    long = over_last(numbers.results, "NCT-R2DeeperR(paper)", "NCT-R2DeeperR", 200)
    if ours is None or theirs is None or long is None:
        return None
    jump = theirs.worst_loss > ours.worst_loss * 1.2
    later = (
        "later they lead"
        if long.clear and long.value > 0
        else "later they trail"
        if long.clear
        else "later there is no clear difference"
    )
    return Finding(
        f"{signed(long.value, 2)}|points, pairs over the last 200 epochs",
        f"New blocks closed by pairs: the loss {'jumps' if jump else 'stays calm'} at first; {later}",
        "A new block that ends in a batch norm can be closed by paired weights, as the paper writes, or by γ = 0, the "
        "library’s "
        f"default. Both are exact. Within ten steps the loss goes from {theirs.first_loss:.2f} to {theirs.worst_loss:.2f} "
        f"with pairs, "
        f"from {ours.first_loss:.2f} to {ours.worst_loss:.2f} with γ = 0; an epoch later they have {theirs.one_epoch:.1f} % "
        f"and "
        f"{ours.one_epoch:.1f} %. Over the last 200 epochs pairs less γ = 0: {signed(long.value, 2)} [{signed(long.low, 2)}, "
        f"{signed(long.high, 2)}] points.",
    )


def overfitted(numbers: Numbers) -> Finding | None:
    teacher, scratch = numbers.pair("OF-Student", "OF-Teacher"), numbers.pair("OF-Student", "OF-Rand")
    if teacher is None or scratch is None:
        return None
    stuck = not (teacher.late.clear and teacher.late.value > 0)
    return Finding(
        f"{signed(scratch.late.value)}|points against scratch",
        "An overfitted network is not worth growing" if stuck else "A student of an overfitted teacher gains",
        f"Over the last ten epochs, against its teacher {verdict(teacher.late, 'higher', 'lower')}; against the same "
        f"network from "
        f"scratch {verdict(scratch.late, 'higher', 'lower')}.",
        "bad" if stuck else "good",
    )


def initialised(numbers: Numbers) -> Finding | None:
    he, std, pair = numbers.growth("BI-He"), numbers.growth("BI-Std"), numbers.pair("BI-Std", "BI-He")
    if he is None or std is None or pair is None:
        return None
    text = (
        f"One epoch after the growth: {std.one_epoch:.1f} % with the deviation of the weights that new ones join, "
        f"{he.one_epoch:.1f} % "
        f"with He’s. Matched against He over the last ten epochs: {verdict(pair.late, 'better', 'worse')}."
    )
    free = numbers.growth("BI-He(NoDrop)"), numbers.growth("BI-Std(NoDrop)")
    if free[0] and free[1]:
        text += f" Without the rate drop: {free[1].one_epoch:.1f} % and {free[0].one_epoch:.1f} %."
    harmless = abs(std.one_epoch - he.one_epoch) < 1
    title = "He initialisation did no harm here" if harmless else "The scale of new weights matters"
    return Finding(f"{signed(pair.late.value)}|points, matched against He", title, text)


def filters(numbers: Numbers) -> Finding | None:
    found = changes(numbers.filters)
    if not {"VIZ-R2R", "VIZ-Net2Net"} <= set(found):
        return None
    r2r, copied = found["VIZ-R2R"], found["VIZ-Net2Net"]
    parted = r2r.twins.high < 0.9
    return Finding(
        f"{r2r.twins.value:.2f}|cosine of former twins",
        "Twins part without noise, and stay a little alike"
        if parted and r2r.twins.low > 0
        else "Former twins at the end of training",
        f"R2R’s twins, equal at the growth: {plain(r2r.twins)} at the end; filters of different pairs {plain(r2r.others)}. "
        f"First filters "
        f"keep {plain(r2r.kept)} (Net2Net {plain(copied.kept)}). Net2Net’s new filters keep their pattern, "
        f"{plain(copied.pattern)}; "
        f"R2R’s do not, {plain(r2r.pattern)}.",
    )


FINDINGS: tuple[Callable[[Numbers], Finding | None], ...] = (
    exactness,
    steps_after,
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


def lede(numbers: Numbers) -> str:
    """What was run, on what, in one sentence."""
    done, any_result = numbers.work, next(iter(numbers.results.values()))
    seeds = sorted({len(content["seeds"]) for content in numbers.results.values()})
    each = f"{' or '.join(map(str, seeds))} seeds each" if seeds != [1] else "one seed each"
    devices = " and ".join(f"{duration(seconds)} on one {machine(device)}" for device, seconds in done.seconds.items())
    return (
        f"The experiments of “Towards a More Complete Theory of Function Preserving Transforms”, run again on "
        f"{any_result['data']}: {done.arms} arms, {each}, {done.growths} growths by outgrow’s public functions, "
        f"{amount(done.flops, 'FLOP')} of training in {devices}."
    )


def machine(device: str) -> str:
    """A processor is called after its architecture in result files."""
    return f"CPU ({device})" if device in ("x86_64", "AMD64", "aarch64", "arm64") else device
