"""The honest comparison as tables, for the report and for docs/results/does-it-pay.md.

Cells are plain text in which **…** is bold: a difference whose 95 % interval over seeds leaves zero out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from experiments.pages.looks import ACCOUNT_NAMES
from experiments.reading.comparison import ACCOUNTS, SCRATCH, Best, Comparison, Line, Need, against, gain, gap, need
from experiments.reading.curves import Estimate
from experiments.reading.tables import spread
from experiments.reading.words import interval, share, signed

VERBS = {"widen": "Widening", "deepen": "Deepening", "both": "Both"}
WAYS = {
    "scratch": "from scratch",
    "widen": "the small network alone",
    "deepen": "the small network alone",
    "r2r": "r2r",
    "r2r-0.1": "r2r, grown after 10 %",
    "r2r-0.5": "r2r, grown after 50 %",
    "r2r-flops": "r2r, cosine over FLOPs",
    "r2r-rewarm": "r2r, rate rises again to the cosine",
    "r2r-repeak": "r2r, rate rises again to the peak",
    "r2r-paper": "r2r-paper (paired)",
    "net2net": "net2net",
    "netmorph": "netmorph",
    "copies": "r2r, copied units",
    "copy": "copy (does not preserve)",
    "fade": "faded in",
    "random": "random (does not preserve)",
    "deepen-first": "r2r, deeper, then wider",
    "widen-first": "r2r, wider, then deeper",
}
FADES = {"widen-fade": "random, faded in", "deepen-fade": "copy, faded in"}
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
    if line.account == "RE" and line.way in ("widen", "deepen"):
        return "the small network, trained on"
    return FADES.get(line.name.split("-", 1)[1]) or WAYS.get(line.way, line.way)


def in_order(compared: Comparison, account: str, what: str) -> list[Line]:
    """The rivals, then the grown ones."""
    rivals = compared.lines.get(SCRATCH), compared.small(account, what)
    order = list(WAYS)
    grown = sorted(compared.of(account, what), key=lambda line: order.index(line.way))
    return [line for line in rivals if line is not None] + grown


def rivals_table(compared: Comparison) -> Table:
    """The best way at each budget and r2r, against scratch and against the small network alone."""
    budgets, rows = list(compared.scratch.ends), []
    for account, title in ACCOUNTS.items():
        for what in VERBS:
            small = compared.small(account, what)
            for rival, name in (("scratch", "scratch"), ("alone", name_of(small) if small else "")):
                for way in ("r2r", ""):
                    found = against(compared, account, what, way)[rival]
                    cells = (versus(found.get(budget), way) for budget in budgets)
                    rows += [(f"{VERBS[what].lower()}, {title}: {way or 'the best'} − {name}", *cells)] if found else []
    head = ("points of accuracy at budget", *(f"{budget:g}" for budget in budgets))
    return Table("r2r, and the best way at each budget, against their rivals", head, tuple(rows))


def versus(one: Best | None, way: str) -> str:
    if one is None:
        return "–"
    return bold(signed(one.gap.value), one.clear) + ("" if way else f" {name_of(one.line)}")


def accuracy_table(compared: Comparison, account: str, what: str) -> Table:
    found = in_order(compared, account, what)
    budgets = sorted({budget for line in found[1:] for budget in line.ends})
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


def gain_table(compared: Comparison, what: str) -> Table | None:
    small = compared.small("RE", what)
    if small is None:
        return None
    budgets = list(small.ends)
    rows = []
    for line in in_order(compared, "RE", what)[1:]:
        gains = [gain(line, small, budget) for budget in budgets]
        cells = (f"{bold(signed(one.value), one.clear)} {interval(one)}" if one else "–" for one in gains)
        rows.append((name_of(line), *cells))
    caption = f"{VERBS[what]}, reuse: points above the small network that was there"
    return Table(caption, ("budget", *(f"{budget:g}" for budget in budgets)), tuple(rows))


def cost_of(one: Need) -> str:
    if not one.reached:
        return "not reached"
    bound = "≤ " if one.at_most else ""
    budget = "at once" if one.at_once == one.n else f"{bound}{one.budget:.1f}" if math.isfinite(one.budget) else "–"
    if one.saving is not None and one.at_once < one.n:
        budget += f" ({bold(('at least ' if bound else '') + less(one.saving), one.saving.clear)})"
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
    budgets = sorted({budget for own in compared.tuned.values() for budget in own})
    rows = [
        (kind, *(f"{own[budget].rate:g}, {own[budget].decay:g}" if budget in own else "–" for budget in budgets))
        for kind, own in compared.tuned.items()
    ]
    head = "kind of run, budget", *(f"{budget:g}" for budget in budgets)
    return Table("What tuning chose: peak rate and weight decay", head, tuple(rows))


def tables(compared: Comparison) -> list[Table]:
    """Those for which there are lines."""
    pairs = [(account, what) for what in ("widen", "deepen", "both") for account in ACCOUNTS if compared.of(account, what)]
    gains = [table for what in ("widen", "deepen") if (table := gain_table(compared, what))]
    made = [accuracy_table(compared, *pair) for pair in pairs] + gains + [cost_table(compared, *pair) for pair in pairs]
    return [rivals_table(compared), *made, sweep_table(compared), tuned_table(compared)]
