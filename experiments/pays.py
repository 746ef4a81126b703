"""Does growing pay? The honest comparison as answers and tables, for the report and for docs/does-it-pay.md.

    python -m experiments.pays [--results FOLDER] [--out PAGE]

Every number and every verdict is computed from the results. A difference is called one when its 95 % interval over seeds leaves
zero out. Cells are plain text in which **…** is bold.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.comparison import ACCOUNTS, SCRATCH, Comparison, Line, Need, at_the_edge, gain, gap, need, read
from experiments.curves import Estimate
from experiments.findings import Finding, interval, share, signed
from experiments.parts import ACCOUNT_NAMES
from experiments.protocol import BIG, DECAYS, RATES, SMALL, SWEPT_AT, TEACHER, TUNED_AT, cost
from experiments.results import ResultsError
from experiments.tables import spread

RESULTS, PAGE = Path(__file__).parent / "results", Path("docs") / "does-it-pay.md"
VERBS = {"widen": "Widening", "deepen": "Deepening", "both": "Both"}
WAYS = {
    "scratch": "from scratch",
    "widen": "the small network alone",
    "deepen": "the small network alone",
    "r2r": "r2r",
    "r2r-0.1": "r2r, grown after 10 %",
    "r2r-0.5": "r2r, grown after 50 %",
    "r2r-paper": "r2r-paper (paired)",
    "net2net": "net2net",
    "netmorph": "netmorph",
    "copies": "r2r, copied units",
    "copy": "copy (does not preserve)",
    "fade": "copy, faded in",
    "random": "random (does not preserve)",
    "deepen-first": "r2r, deeper, then wider",
    "widen-first": "r2r, wider, then deeper",
}
SETTINGS = {
    "rate": "learning rate ×",
    "decay": "weight decay ×",
    "scale": "scale of new weights ×",
    "state": "optimizer state",
    "new_rate": "rate of new units ×",
}


@dataclass(frozen=True)
class Table:
    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def bold(text: str, clear: bool) -> str:
    return f"**{text}**" if clear else text


def name_of(line: Line) -> str:
    return WAYS.get(line.way, line.way)


def in_order(compared: Comparison, account: str, what: str) -> list[Line]:
    """The rivals, then the grown ones."""
    rivals = [SCRATCH, *([f"EQ-small-{what}"] if account == "EQ" else [])]
    order = list(WAYS)
    grown = sorted(compared.of(account, what), key=lambda line: order.index(line.way))
    return [compared.lines[name] for name in rivals if name in compared.lines] + grown


def accuracy_table(compared: Comparison, account: str, what: str) -> Table:
    found = in_order(compared, account, what)
    budgets = list(found[-1].ends)
    rows = []
    for line in found:
        cells = [] if account == "EQ" else [f"{start_of(line):.1f}" if line.start else "–"]
        for budget in budgets:
            text = f"{line.mean(budget):.1f} ± {spread(line.values(budget)):.1f}" if budget in line.ends else "–"
            other = gap(line, compared.scratch, budget) if line.name != SCRATCH else None
            cells.append(text if other is None else f"{text} ({bold(signed(other.value), other.clear)})")
        rows.append((name_of(line), *cells))
    head = ("budget", *(["at the growth"] if account == "RE" else []), *(f"{budget:g}" for budget in budgets))
    return Table(f"{VERBS[what]}, {ACCOUNTS[account]}: final accuracy in per cent", head, tuple(rows))


def start_of(line: Line) -> float:
    return float(np.mean(list((line.start or {}).values())))


def gain_table(compared: Comparison, what: str) -> Table:
    found = compared.of("RE", what)
    budgets = list(found[0].ends)
    rows = []
    for line in in_order(compared, "RE", what)[1:]:
        gains = [gain(line, budget) for budget in budgets]
        rows.append(
            (name_of(line), *(f"{bold(signed(one.value), one.clear)} {interval(one)}" if one else "–" for one in gains))
        )
    caption = f"{VERBS[what]}, reuse: points above what the network had just after the growth"
    return Table(caption, ("budget", *(f"{budget:g}" for budget in budgets)), tuple(rows))


def cost_of(one: Need) -> str:
    if not one.reached:
        return "not reached"
    budget = "at once" if one.budget == 0 else f"{one.budget:.1f}" if math.isfinite(one.budget) else "–"
    if one.saving is not None:
        budget += f" ({bold(less(one.saving), one.saving.clear)})"
    budget += f", {one.reached} of {one.n} seeds" if one.reached < one.n else ""
    return budget + (f", at once in {one.at_once}" if 0 < one.at_once < one.n else "")


def less(one: Estimate) -> str:
    """17 % less [14, 19]"""
    return share(one, "").replace("fewer ", "less").replace("more ", "more").replace(", no clear difference", "")


def cost_table(compared: Comparison, account: str, what: str) -> Table:
    targets = compared.targets()
    rows = [
        (name_of(line), *(cost_of(need(line, compared.scratch, target)) for target in targets.values()))
        for line in in_order(compared, account, what)
    ]
    head = ("budget for", *(name if "%" in name else f"{name}: {target:.1f} %" for name, target in targets.items()))
    return Table(f"{VERBS[what]}, {ACCOUNTS[account]}: what an accuracy costs", head, tuple(rows))


def sweep_table(compared: Comparison) -> Table:
    columns = list(dict.fromkeys((row.what, row.account) for row in compared.swept))
    rows = []
    for setting, value in dict.fromkeys((row.setting, row.value) for row in compared.swept):
        cells = []
        for what, account in columns:
            key = (what, account, setting, value)
            row = next((one for one in compared.swept if (one.what, one.account, one.setting, one.value) == key), None)
            if row is None or row.difference is None:
                cells.append("–" if row is None else f"{row.mean:.1f} %")
            else:
                cells.append(f"{bold(signed(row.difference.value), row.difference.clear)} {interval(row.difference)}")
        rows.append((f"{SETTINGS[setting]} {value:g}" if isinstance(value, float) else f"{SETTINGS[setting]} {value}", *cells))
    head = ("changed at the growth", *(f"{VERBS[what].lower()}, {ACCOUNT_NAMES[account]}" for what, account in columns))
    return Table("One thing changed at a growth: held-out accuracy, and the difference in points", head, tuple(rows))


def tuned_table(compared: Comparison) -> Table:
    rows = tuple((kind, f"{one.rate:g}", f"{one.decay:g}") for kind, one in compared.chosen.items())
    return Table("What tuning chose for each kind of run", ("kind", "peak rate", "weight decay"), rows)


def tables(compared: Comparison) -> list[Table]:
    """Those for which there are lines."""
    pairs = [(account, what) for what in ("widen", "deepen", "both") for account in ACCOUNTS if compared.of(account, what)]
    gains = [gain_table(compared, what) for what in ("widen", "deepen") if compared.of("RE", what)]
    made = [accuracy_table(compared, *pair) for pair in pairs] + gains + [cost_table(compared, *pair) for pair in pairs]
    return [*made, sweep_table(compared), tuned_table(compared)]


def row_of(gaps: dict[float, Estimate]) -> str:
    """+4.2, +1.9, +0.3 at budgets 2, 4, 8 (clear at 2, 4)"""
    clear = [f"{budget:g}" for budget, one in gaps.items() if one.clear]
    return (
        f"{', '.join(signed(one.value) for one in gaps.values())} at budgets {', '.join(f'{budget:g}' for budget in gaps)} "
        f"({'clear at ' + ', '.join(clear) if clear else 'none of it clear'})"
    )


def at_equal_flops(compared: Comparison) -> Finding | None:
    """Does growth ever beat scratch, from nothing?"""
    told, wins = [], dict[float, float]()
    for what in ("widen", "deepen", "both"):
        against: dict[float, Estimate] = {}
        beside: dict[float, Estimate] = {}
        small = compared.lines.get(f"EQ-small-{what}")
        for budget in compared.scratch.ends:
            gaps = [(one, line) for line in compared.of("EQ", what) if (one := gap(line, compared.scratch, budget))]
            if not gaps:
                continue
            against[budget], line = max(gaps, key=lambda pair: pair[0].value)
            if small is not None and (one := gap(line, small, budget)):
                beside[budget] = one
        if not against:
            continue
        for budget, one in against.items():
            if one.clear and one.value > 0:
                wins[budget] = max(wins.get(budget, 0.0), one.value)
        told.append(f"{VERBS[what]}, the best way at each budget against scratch: {row_of(against)}")
        told[-1] += f"; against the small network alone: {row_of(beside)}." if beside else "."
    if not told:
        return None
    where = ", ".join(f"{budget:g}" for budget in sorted(wins))
    return Finding(
        f"{signed(max(wins.values()))}|points at best" if wins else "0|clear wins",
        f"From nothing, growth beats scratch at budgets {where}" if wins else "From nothing, growth never beats scratch",
        " ".join(told),
        "plain" if wins else "bad",
    )


def reused(compared: Comparison) -> Finding | None:
    """What reuse buys: against scratch, and against the small network that one had."""
    told, gains = [], []
    for what in ("widen", "deepen"):
        line = compared.lines.get(f"RE-{what}-r2r")
        if line is None:
            continue
        against = {budget: one for budget in line.ends if (one := gap(line, compared.scratch, budget))}
        above = {budget: one for budget in line.ends if (one := gain(line, budget))}
        gains.append(above)
        told.append(
            f"{VERBS[what]}, r2r, against scratch: {row_of(against)}; against the small network itself: {row_of(above)}."
        )
    if not told:
        return None
    pays_at = [budget for above in gains for budget, one in above.items() if one.clear and one.value > 0]
    best = max(one.value for above in gains for one in above.values())
    title = f"Above what one had, from {min(pays_at):g} epochs on" if pays_at else "No better than what one had"
    return Finding(
        f"{signed(best)}|points above the small network at best", f"Reuse: {title[0].lower()}{title[1:]}", " ".join(told)
    )


def to_seventy(compared: Comparison) -> Finding | None:
    told, figure = [], 0.0
    for what in ("widen", "deepen"):
        found = [one for line in compared.of("EQ", what) if (one := need(line, compared.scratch, 70.0)).saving is not None]
        if not found:
            continue
        best = max(found, key=lambda one: one.saving.value if one.saving else -math.inf)
        assert best.saving is not None
        figure = max(figure, best.saving.value)
        told.append(f"{VERBS[what]} from nothing, {name_of(compared.lines[best.line])}: {share(best.saving)}.")
        small = compared.lines.get(f"EQ-small-{what}")
        alone = need(small, compared.scratch, 70.0) if small else None
        if alone is not None and alone.saving is not None:
            told.append(f"The small network alone: {share(alone.saving)}.")
        reuse = compared.lines.get(f"RE-{what}-r2r")
        if reuse is not None and reuse.start and min(reuse.start.values()) >= 70:
            told.append(f"Under reuse it is there at once: the small network has {start_of(reuse):.1f} %.")
    if not told:
        return None
    return Finding(f"{100 * figure:.0f} %|fewer FLOPs to 70 %, from nothing", "Compute to 70 %", " ".join(told))


def to_the_end(compared: Comparison) -> Finding | None:
    """Compute to what the big network reaches, under reuse."""
    told, figure = [], ("none", "accuracy is reached in all seeds")
    for what in ("widen", "deepen"):
        for title, target in list(compared.targets().items())[1:]:
            found = [need(line, compared.scratch, target) for line in compared.of("RE", what)]
            whole = [one for one in found if one.saving is not None]
            goal = f"{VERBS[what]}, {target:.1f} % ({title})"
            if not whole:
                hits, own = max((one.reached for one in found), default=0), need(compared.scratch, compared.scratch, target)
                told.append(f"{goal}: in {hits} of {own.n} seeds at most; from scratch in {own.reached}.")
                continue
            best = max(whole, key=lambda one: one.saving.value if one.saving else -math.inf)
            assert best.saving is not None
            there = f"; in {best.at_once} of {best.n} seeds the small network itself has it" if best.at_once else ""
            told.append(f"{goal}: {share(best.saving)} ({name_of(compared.lines[best.line])}{there}).")
            figure = f"{100 * best.saving.value:.0f} %", f"fewer FLOPs to {target:.1f} %, under reuse"
    if not told:
        return None
    return Finding("|".join(figure), "Compute to what the big network reaches, under reuse", " ".join(told))


def recommended(compared: Comparison) -> Finding | None:
    """What should change at a growth: whatever is clearly better than to change nothing, and what clearly harms."""
    if not compared.swept:
        return None
    tried = [row for row in compared.swept if row.difference is not None]
    clear = [row for row in tried if row.difference is not None and row.difference.clear]
    better = [row for row in clear if row.difference is not None and row.difference.value > 0]
    worse = len(clear) - len(better)
    named = "; ".join(
        f"{SETTINGS[row.setting]} {row.value} ({VERBS[row.what].lower()}, {ACCOUNT_NAMES[row.account]}: "
        f"{signed(row.difference.value if row.difference else 0.0)})"
        for row in better
    )
    text = (
        f"Of {len(tried)} changes of learning rate, weight decay, scale, optimizer state and the rate of new units, {worse} "
        f"are clearly worse than none and {len(better)} clearly better" + (f": {named}." if better else ".")
    )
    nothing = not [row for row in better if row.account == "nothing"]
    if nothing:
        text += (
            " In the middle of a schedule nothing is better than to change nothing, and that is what the library does by "
            "default: the optimizer's state is carried, rate and decay are left to the schedule, new weights have the "
            "deviation of those they join."
        )
    text += f" With so many comparisons, about {0.025 * len(tried):.0f} would look better by chance."
    return Finding(
        f"{worse} of {len(tried)}|changes do harm",
        "In a schedule, change nothing at a growth" if nothing else "Some changes help",
        text,
    )


ANSWERS = (to_seventy, to_the_end, reused, at_equal_flops, recommended)


def answers(compared: Comparison) -> list[Finding]:
    return [found for answer in ANSWERS if (found := answer(compared)) is not None]


def caveats(compared: Comparison) -> list[str]:
    """What to hold against these numbers."""
    seeds = len(compared.scratch.seeds)
    slower = [row for row in compared.swept if (row.what, row.account, row.setting) == ("widen", "reuse", "rate")]
    better = [row for row in slower if row.difference and row.difference.clear and row.difference.value > 0]
    parts = {part for content in compared.results.values() for part in content["command"].split("; ")}
    teachers = ", ".join(f"{TEACHER * cost(SMALL[what]) / cost(BIG):.1f} ({VERBS[what].lower()})" for what in SMALL)
    return [
        f"{seeds} seeds, and many comparisons, none of them corrected for: the best of several ways is a lucky one in part.",
        f"Tuning: {len(RATES)} rates × {len(DECAYS)} weight decays for each kind of run, at budget {TUNED_AT} ({TUNED_AT // 2} "
        f"under reuse), {compared.tuned_with} seeds, on held-out images; what was best there is used at all budgets. Grown "
        "runs were tuned with r2r, growing after a quarter of the budget (both ways: deeper first), and other methods and "
        "moments took that over. The best rate lies at the end of the grid for "
        f"{', '.join(at_the_edge(compared.chosen, 'rate')) or 'none'}, the best weight decay for "
        f"{', '.join(at_the_edge(compared.chosen, 'decay')) or 'none'}.",
        "Under reuse the rate was tuned on a teacher of other settings than the one that is grown here."
        + (" The sweep, on the same teacher as here, finds another rate better for widening." if better else ""),
        "Under reuse there is no rival that trains the small network on, and scratch was tuned at a longer budget than those "
        f"at which it loses. The small network had {TEACHER} epochs, which cost as much as so many of the big one: {teachers}.",
        f"The sweep is at budget {2 * SWEPT_AT} from nothing and {SWEPT_AT} under reuse.",
        *([f"Not all seeds were trained by one command, but by {len(parts)}."] if len(parts) > 1 else []),
        "Small networks of one family, on images of 32 × 32 pixels.",
    ]


def markdown(table: Table) -> str:
    lines = [
        f"### {table.caption}",
        "",
        "| " + " | ".join(table.head) + " |",
        "| " + " | ".join("---" for _ in table.head) + " |",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table.rows), ""])


def page(compared: Comparison) -> str:
    made = next(iter(compared.results.values()))
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    said = "\n".join(f"- **{one.title}.** {one.text}" for one in answers(compared))
    held = "\n".join(f"- {one}" for one in caveats(compared))
    return f"""# Does growing pay?

Made by `python -m experiments.pays` from [experiments/results](../experiments/results), which `python -m experiments --set
tuning`, then `sweep`, then `protocol` made on one {made["device"]} ({versions}). How it is done is told in
[experiments/protocol.py](../experiments/protocol.py): CIFAR-10, ResNetCifar-18(1/4), which is reached by widening 18(1/8) by
two, by deepening 10(1/4), or from 10(1/8) by both; AdamW, a cosine down to zero in every run, as much tuning for each kind of
run, paired seeds. A budget is so many epochs of the big network, in FLOPs. Two accounts: *from nothing* counts the small
network's training; under *reuse* a trained small network is there already.

![Accuracy by budget, widening and deepening, in both accounts](does-it-pay.svg)

{said}

What to hold against it:

{held}

In brackets behind an accuracy is the difference from scratch at the same budget, in points; bold where its 95 % interval over
paired seeds (Student's t) leaves zero out. What an accuracy saves has a bootstrap interval, where all seeds reach it.

{chr(10).join(markdown(table) for table in tables(compared))}"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.pays", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="a folder with protocol, sweep and tuning (the kept ones)"
    )
    parser.add_argument("--out", type=Path, default=PAGE, help=f"the page to write, its picture beside it (default: {PAGE})")
    options = parser.parse_args(arguments)
    try:
        write(options.results, options.out)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    return 0


def write(results: Path, out: Path) -> None:
    """The page, and its picture beside it."""
    from experiments.budgets import draw_page

    compared = read(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_page(compared, out.with_suffix(".svg"))
    out.write_text(page(compared), encoding="utf-8")
    print(f"{out} is written")


if __name__ == "__main__":
    sys.exit(main())
