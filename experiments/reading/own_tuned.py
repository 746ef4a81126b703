"""Every way tuned for itself: differences seed by seed with bootstrap intervals, and what preserving the function is worth.

The runs are those of `own_tuning.py`. Intervals are percentiles over resampled seeds, which with five seeds are narrower than
they should be; bold, as in the other tables, is a difference that is clear by Student's t. Where a row names the best of
several ways, both are corrected for their number (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace

from experiments.reading.comparison import ACCOUNTS, SCRATCH, Best, Comparison, Line, against, gap, lines
from experiments.reading.curves import bootstrap
from experiments.reading.ways import VERBS, Table, accuracy_table, bold, in_order, name_of, tables, tuned_table
from experiments.reading.words import interval, signed
from experiments.setting.own_tuning import KINDS, PREFIX, description, line_arms
from experiments.setting.protocol import TUNED_UP_TO

OWN, SHARED = "every way tuned for itself", "settings shared"
GRIDDED = ("scratch", "widen", "deepen", "r2r")  # ways that were tuned with the full grid


def own_of(compared: Comparison) -> Comparison | None:
    """The comparison in which every way is tuned for itself; None where none of its runs were made.

    Runs that it shares with the other comparison are found by their description.
    """
    by_description = {description(content["arm"]): content for content in compared.results.values()}
    found = {
        f"{line}@{budget:g}": by_description[key]
        for line, arms in line_arms(compared.own).items()
        for budget, arm in arms.items()
        if (key := description(asdict(arm))) in by_description
    }
    made = any(name.startswith(PREFIX) for name in compared.results)
    if not made or not any(name.startswith(f"{SCRATCH}@") for name in found):
        return None
    return replace(compared, lines=lines(found), tuned=compared.own, swept=[], own={})


def fairest(compared: Comparison) -> Comparison:
    """The comparison from which answers are read: every way tuned for itself, where those runs were made.

    Up to the budget to which the full grid was tried, r2r and its rivals keep what was best in all of it.
    """
    own = own_of(compared)
    if own is None:
        return compared
    gridded = {name: line for name, line in own.lines.items() if line.way in GRIDDED and name in compared.lines}
    return replace(own, lines=own.lines | {name: joined(compared.lines[name], line) for name, line in gridded.items()})


def joined(first: Line, own: Line) -> Line:
    """Budgets up to that of the full grid from one comparison, longer ones from the other."""
    short = {budget: one for budget, one in first.ends.items() if budget <= TUNED_UP_TO}
    return replace(first, ends=short | {budget: one for budget, one in own.ends.items() if budget > TUNED_UP_TO})


def cell(one: Line | None, other: Line | None, budget: float, tried: int = 1) -> str:
    """+1.2 [+0.7, +1.6], in bold where it is clear for the best of as many as were tried."""
    found = gap(one, other, budget) if one is not None and other is not None else None
    if one is None or other is None or found is None:
        return "–"
    mine, theirs = one.ends[budget], other.ends[budget]
    drawn = bootstrap([mine[seed] - theirs[seed] for seed in sorted(set(mine) & set(theirs))], level=1 - 0.05 / tried)
    return f"{bold(signed(found.value), Best(one, found, tried).clear)} {interval(drawn)}"


def best_cell(best: Best | None, rival: Line | None, budget: float) -> str:
    return "–" if best is None else f"{cell(best.line, rival, budget, best.tried)} {name_of(best.line)}, best of {best.tried}"


def at_the_ends(own: Comparison) -> str:
    """Kinds of runs whose best rate is the lowest or the highest that was tried, so that a better one may lie beyond."""
    found = []
    for kind in KINDS:
        rates = {budget: [rate for rate, _ in kind.pairs(budget)] for budget in kind.budgets}
        chosen = own.tuned.get(kind.name, {})
        ends = [
            f"{budget:g}" for budget, one in chosen.items() if one.rate in (min(rates[int(budget)]), max(rates[int(budget)]))
        ]
        found += [f"{kind.name} ({', '.join(ends)})"] if ends else []
    return "; ".join(found) or "none"


def budgets_of(found: Iterable[Line | None]) -> list[float]:
    return sorted({budget for line in found if line is not None for budget in line.ends})


def differences_table(own: Comparison, account: str, what: str) -> Table:
    """r2r and the best way against their rivals, and all other ways against r2r."""
    grown = [line for line in in_order(own, account, what) if line in own.of(account, what)]
    ours, small, budgets = own.lines.get(f"{account}-{what}-r2r"), own.small(account, what), budgets_of(grown)
    rows = []
    for key, rival, name in (("scratch", own.scratch, "scratch"), ("alone", small, name_of(small) if small else "")):
        if ours is not None and rival is not None:
            rows.append((f"r2r − {name}", *(cell(ours, rival, budget) for budget in budgets)))
        best = against(own, account, what)[key]
        if best:
            rows.append((f"the best − {name}", *(best_cell(best.get(budget), rival, budget) for budget in budgets)))
    others = [line for line in grown if line is not ours] if ours is not None else []
    rows += [(f"{name_of(line)} − r2r", *(cell(line, ours, budget) for budget in budgets)) for line in others]
    head = ("points of accuracy at budget", *(f"{budget:g}" for budget in budgets))
    return Table(f"{VERBS[what]}, {ACCOUNTS[account]}, {OWN}: differences", head, tuple(rows))


def preserving_table(compared: Comparison, own: Comparison | None) -> Table | None:
    """r2r against random padding: at the settings that are best for r2r, and each at its own."""
    found = []
    for source, how in ((compared, "at the settings of r2r"), (own, "each tuned for itself")):
        for account, title in reversed(ACCOUNTS.items()):
            for what in ("deepen", "widen"):
                ours, padded = (source.lines.get(f"{account}-{what}-{way}") if source else None for way in ("r2r", "random"))
                if ours is not None and padded is not None:
                    found.append((f"{VERBS[what].lower()}, {title}, {how}", ours, padded))
    budgets = budgets_of(padded for _, _, padded in found)
    rows = tuple((name, *(cell(ours, padded, budget) for budget in budgets)) for name, ours, padded in found)
    head = ("points of accuracy at budget", *(f"{budget:g}" for budget in budgets))
    return Table("What preserving the function is worth: r2r − random padding", head, rows) if rows else None


def own_tables(compared: Comparison) -> list[Table]:
    """What preserving is worth; and, where its runs were made, the comparison in which every way is tuned for itself."""
    own = own_of(compared)
    first = preserving_table(compared, own)
    made = [] if first is None else [first]
    if own is None:
        return made
    pairs = [(account, what) for what in VERBS for account in ACCOUNTS if own.of(account, what)]
    for pair in pairs:
        accuracies = accuracy_table(own, *pair)
        made += [replace(accuracies, caption=f"{accuracies.caption}, {OWN}"), differences_table(own, *pair)]
    chosen = tuned_table(own)
    return [*made, replace(chosen, caption=f"{chosen.caption}, {OWN}")]


def other_tables(compared: Comparison) -> list[Table]:
    """Those of the comparison in which grown runs share settings, named so where there is another one beside it."""
    *made, swept, chosen = tables(compared)
    if own_of(compared) is not None:
        made = [replace(one, caption=f"{one.caption}, {SHARED}") for one in made]
    return [*made, swept, chosen]
