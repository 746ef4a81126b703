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

from experiments.comparison import SCRATCH, Comparison, Line, Need, at_the_edge, gap, need, read
from experiments.curves import Estimate
from experiments.findings import Finding, interval, share, signed
from experiments.protocol import DECAYS, RATES, SWEPT_AT, TEACHER, TUNED_AT
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
ACCOUNTS = {"EQ": "from nothing", "RE": "reuse"}


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
        cells = [] if account == "EQ" else ["–" if line.start is None else f"{sum(line.start) / len(line.start):.1f}"]
        for budget in budgets:
            text = f"{line.mean(budget):.1f} ± {spread(line.ends[budget]):.1f}" if budget in line.ends else "–"
            other = gap(line, compared.scratch, budget) if line.name != SCRATCH else None
            cells.append(text if other is None else f"{text} ({bold(signed(other.value), other.clear)})")
        rows.append((name_of(line), *cells))
    head = ("budget", *(["at the growth"] if account == "RE" else []), *(f"{budget:g}" for budget in budgets))
    return Table(f"{VERBS[what]}, {ACCOUNTS[account]}: final accuracy in per cent", head, tuple(rows))


def cost_of(one: Need) -> str:
    if not one.reached:
        return "not reached"
    budget = "at once" if one.budget == 0 else f"{one.budget:.1f}" if math.isfinite(one.budget) else "–"
    if one.saving is not None:
        budget += f" ({bold(less(one.saving), one.saving.clear)})"
    return budget + (f", {one.reached} of {one.n} seeds" if one.reached < one.n else "")


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
    names = {"nothing": "from nothing", "reuse": "reuse"}
    head = ("changed at the growth", *(f"{VERBS[what].lower()}, {names[account]}" for what, account in columns))
    return Table("One thing changed at a growth: held-out accuracy, and the difference in points", head, tuple(rows))


def tuned_table(compared: Comparison) -> Table:
    rows = tuple((kind, f"{one.rate:g}", f"{one.decay:g}") for kind, one in compared.chosen.items())
    return Table("What tuning chose for each kind of run", ("kind", "peak rate", "weight decay"), rows)


def tables(compared: Comparison) -> list[Table]:
    """Those for which there are lines."""
    pairs = [(account, what) for what in ("widen", "deepen", "both") for account in ACCOUNTS if compared.of(account, what)]
    made = [accuracy_table(compared, *pair) for pair in pairs] + [cost_table(compared, *pair) for pair in pairs]
    return [*made, sweep_table(compared), tuned_table(compared)]


def at_equal_flops(compared: Comparison) -> Finding | None:
    """Does growth ever beat scratch, from nothing?"""
    scratch, told, best = compared.scratch, [], -math.inf
    for what in ("widen", "deepen", "both"):
        wins, losses, over_small = [], [], []
        for budget in scratch.ends:
            gaps = [(found, line) for line in compared.of("EQ", what) if (found := gap(line, scratch, budget))]
            if not gaps:
                continue
            top, line = max(gaps, key=lambda pair: pair[0].value)
            best = max(best, top.value)
            text = f"{signed(top.value)} at {budget:g} ({name_of(line)})"
            (wins if top.clear and top.value > 0 else losses).append(text)
            small = compared.lines.get(f"EQ-small-{what}")
            beyond = gap(line, small, budget) if small else None
            over_small += [f"{budget:g}"] if beyond is not None and beyond.clear and beyond.value > 0 and top.value > 0 else []
        told.append(
            f"{VERBS[what]}, the best way at each budget: "
            + ("clearly ahead of scratch by " + ", ".join(wins) if wins else "never clearly ahead of scratch")
            + ("; not ahead: " + ", ".join(losses) if losses else "")
            + (
                "."
                if not wins or what == "both"
                else "; where it is ahead of scratch it is "
                + (
                    "ahead of the small network too at " + ", ".join(over_small)
                    if over_small
                    else "not ahead of the small network"
                )
                + "."
            )
        )
    if not told:
        return None
    title = "From nothing, growth wins on short budgets alone" if best > 0 else "From nothing, growth never wins"
    return Finding(f"{signed(best)}|points at best", title, " ".join(told), "plain" if best > 0 else "bad")


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
        start = [line.start for line in compared.of("RE", what) if line.start and line.way == "r2r"]
        if start and min(start[0]) >= 70:
            told.append(f"Under reuse it is there at once: the small network has {sum(start[0]) / len(start[0]):.1f} %.")
    if not told:
        return None
    return Finding(f"{100 * figure:.0f} %|fewer FLOPs to 70 %, from nothing", "Compute to 70 %", " ".join(told))


def to_the_end(compared: Comparison) -> Finding | None:
    """Compute to what the big network reaches, under reuse."""
    told, figure = [], (0.0, -math.inf)  # of the highest accuracy that is reached
    for what in ("widen", "deepen"):
        for title, target in list(compared.targets().items())[1:]:
            found = [need(line, compared.scratch, target) for line in compared.of("RE", what)]
            whole = [one for one in found if one.reached == one.n and one.saving is not None]
            if not whole:
                hits = max((one.reached for one in found), default=0)
                told.append(f"{VERBS[what]}: {target:.1f} % ({title}) is reached by no way in all seeds (at most {hits}).")
                continue
            best = max(whole, key=lambda one: one.saving.value if one.saving else -math.inf)
            assert best.saving is not None
            figure = max(figure, (target, best.saving.value))
            there = ", since the small network itself has it" if best.saving.low == 1 else ""
            by = name_of(compared.lines[best.line])
            told.append(f"{VERBS[what]}: {target:.1f} % ({title}) with {share(best.saving)} ({by}){there}.")
    if not told:
        return None
    return Finding(
        f"{100 * figure[1]:.0f} %|fewer FLOPs to {figure[0]:.1f} %, under reuse",
        "Compute to what the big network reaches",
        " ".join(told),
        "good",
    )


def recommended(compared: Comparison) -> Finding | None:
    """What should change at a growth: whatever is clearly better than to change nothing, and what clearly harms."""
    better, worse = [], 0
    for row in compared.swept:
        if row.difference is None or not row.difference.clear:
            continue
        worse += row.difference.value < 0
        if row.difference.value > 0:
            where = f"{VERBS[row.what].lower()}, {'from nothing' if row.account == 'nothing' else 'reuse'}"
            better.append(f"{SETTINGS[row.setting]} {row.value} ({where}: {signed(row.difference.value)})")
    if not compared.swept:
        return None
    tried = sum(row.difference is not None for row in compared.swept)
    return Finding(
        f"{worse} of {tried}|changes do harm",
        "At a growth, change nothing" + (" but the rate of a fresh schedule" if better else ""),
        f"Of {tried} changes of learning rate, weight decay, scale, optimizer state and the rate of new units, {worse} are "
        f"clearly worse than none and {len(better)} clearly better"
        + (": " + "; ".join(better) if better else "")
        + ". So the library's defaults are to carry the optimizer's state, to leave rate and decay to the schedule, and to "
        "draw new weights with the deviation of those they join. Whoever grows a network that is trained to its end, and "
        "begins a new schedule, does well to lower its peak.",
    )


ANSWERS = (to_seventy, to_the_end, at_equal_flops, recommended)


def answers(compared: Comparison) -> list[Finding]:
    return [found for answer in ANSWERS if (found := answer(compared)) is not None]


def caveats(compared: Comparison) -> list[str]:
    """What to hold against these numbers."""
    seeds = len(next(iter(compared.scratch.ends.values())))
    return [
        f"{seeds} seeds; with so few, intervals are rather too narrow, and the best of several ways is a lucky one in part.",
        f"Tuning: {len(RATES)} rates × {len(DECAYS)} weight decays for each kind of run, at budget {TUNED_AT} ({TUNED_AT // 2} "
        f"under reuse), two seeds, on held-out images. The best rate lies at the end of the grid for "
        f"{', '.join(at_the_edge(compared.chosen, 'rate')) or 'none'}, the best weight decay for "
        f"{', '.join(at_the_edge(compared.chosen, 'decay')) or 'none'}.",
        "Under reuse the rate was tuned on a teacher of other settings than the one that is grown here; the sweep, on the same "
        "teacher as here, finds lower rates better for widening. Its lines under reuse could be higher.",
        f"The reused small network was trained for {TEACHER} epochs. The sweep is at budget {2 * SWEPT_AT} from nothing and "
        f"{SWEPT_AT} under reuse.",
        "Small networks of one family on 32 × 32 images: here depth matters little once there are ten layers.",
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
two, by deepening 10(1/4), or from 10(1/8) by both; AdamW, a cosine down to zero in every run, the same tuning for everyone,
paired seeds. A budget is so many epochs of the big network, in FLOPs. Two accounts: *from nothing* counts the small network's
training; under *reuse* a trained small network is there already.

![Accuracy by budget, widening and deepening, in both accounts](does-it-pay.svg)

{said}

What to hold against it:

{held}

In brackets behind an accuracy is the difference from scratch at the same budget, in points; bold where its 95 % interval over
seeds leaves zero out.

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
