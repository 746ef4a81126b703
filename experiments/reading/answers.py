"""The findings of the honest comparison, as cards: every value and every verdict is computed from the results.

A way is called better or worse than a rival where its 95 % interval over seeds (Student's t) excludes zero. The best of several
ways is chosen for each seed on the other seeds and judged on that one, so that the choice does not flatter it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from experiments.pages.looks import ACCOUNT_NAMES
from experiments.reading.comparison import Comparison, Line, Swept, gap, need, needed
from experiments.reading.curves import Estimate, bootstrap, student
from experiments.reading.findings import Finding, Strip
from experiments.reading.own_tuned import fairest, own_of
from experiments.reading.tables import saved
from experiments.reading.ways import SETTINGS, VERBS, name_of, start_of
from experiments.reading.words import fewer, share, signed
from experiments.setting.own_tuning import RIDGE
from experiments.setting.schedules import SCHEDULES

REUSE, NOTHING = "RE", "EQ"
AS_VERBS = {what: VERBS[what].lower() for what in ("widen", "deepen")}


def by_budget(one: Line | None, other: Line | None) -> dict[str, Estimate]:
    if one is None or other is None:
        return {}
    return {f"{budget:g}": found for budget in one.ends if (found := gap(one, other, budget))}


def strip(name: str, one: Line | None, other: Line | None, short: str = "") -> list[Strip]:
    found = by_budget(one, other)
    return [Strip(name, found, short)] if found else []


def ahead(cells: Mapping[str, Estimate], sign: int = 1) -> list[str]:
    return [budget for budget, one in cells.items() if one.clear and sign * one.value > 0]


def reused(what: str) -> Callable[[Comparison], Finding | None]:
    """What reuse buys: against scratch, and against training the small network on."""

    def find(compared: Comparison) -> Finding | None:
        ours, small = compared.lines.get(f"RE-{what}-r2r"), compared.small(REUSE, what)
        scratch, alone = by_budget(ours, compared.scratch), by_budget(ours, small)
        if not scratch or not alone or ours is None:
            return None
        verb = f"{VERBS[what].lower()}, reuse"
        strips = [
            Strip(f"{verb}: r2r − scratch", scratch, "r2r − scratch"),
            Strip(f"{verb}: r2r − trained on", alone, "r2r − trained on"),
        ]
        best = {f"{budget:g}": one for budget in ours.ends if (one := best_elsewhere(compared, REUSE, what, "alone", budget))}
        top = max(alone.values(), key=lambda one: one.value)
        tone = "good" if ahead(scratch) and ahead(alone) else "plain"
        title = f"{VERBS[what]} a trained network beats scratch at budgets {', '.join(ahead(scratch)) or '–'}, "
        title += f"and training it on at {', '.join(ahead(alone)) or 'none'}"
        behind = [(name, ahead(cells, -1)) for name, cells in (("scratch", scratch), ("training it on", alone))]
        title += "".join(f"; {name} is better at {', '.join(budgets)}" for name, budgets in behind if budgets)
        figure = f"{signed(top.value)}|points above training on, at best"
        more = (Strip(f"{verb}: best way, chosen on other seeds, − trained on", best),) if best else ()
        return Finding(figure, title, "", tone, tuple(strips), more)

    return find


def best_elsewhere(compared: Comparison, account: str, what: str, rival: str, budget: float) -> Estimate | None:
    """The lead of the best way over a rival: for each seed the way that is best on the other seeds."""
    other = compared.scratch if rival == "scratch" else compared.small(account, what)
    ways = [line for line in compared.of(account, what) if budget in line.ends]
    if other is None or budget not in other.ends or len(ways) < 2:
        return None
    seeds = sorted(set.intersection(set(other.ends[budget]), *(set(line.ends[budget]) for line in ways)))
    if len(seeds) < 2:
        return None
    leads = []
    for seed in seeds:
        rest = [one for one in seeds if one != seed]
        best = max(ways, key=lambda line, rest=rest: sum(line.ends[budget][one] for one in rest))  # type: ignore[misc]
        leads.append(best.ends[budget][seed] - other.ends[budget][seed])
    return student(leads)


def saving_elsewhere(compared: Comparison, lines: Sequence[Line], target: float) -> tuple[Estimate, str] | None:
    """FLOPs to an accuracy that the best way saves, chosen for each seed on the others; None where seeds do not reach it.

    Of ways with fewer budgets than others the place between two is too uncertain; where one way is left, there is no choice.
    """
    most = max((len(line.ends) for line in lines), default=0)
    lines = [line for line in lines if len(line.ends) == most]
    if len(lines) < 2:
        return None
    base = needed(compared.scratch, target)
    costs = {line.name: needed(line, target) for line in lines}
    costs = {name: own for name, own in costs.items() if set(own) == set(base) and all(map(math.isfinite, own.values()))}
    if len(base) < 2 or not costs or not all(map(math.isfinite, base.values())):
        return None
    mine, names = [], []
    for seed in base:
        best = min(costs, key=lambda name, seed=seed: sum(cost for one, cost in costs[name].items() if one != seed))  # type: ignore[misc]
        mine.append(costs[best][seed])
        names.append(name_of(compared.lines[best]))
    ways = ", ".join(name for name, _ in Counter(names).most_common())
    return bootstrap(mine, list(base.values()), statistic=saved), ways


def preserving(compared: Comparison) -> Finding | None:
    """What preserving the function is worth: r2r against random padding."""
    own = own_of(compared)
    strips, more = leads_of(own or compared), list[Strip]()
    if not strips:
        return None
    first = strips[0].cells
    top = max(first.items(), key=lambda item: item[1].value)
    where = ahead(first)
    lead = f"{abs(top[1].value):.1f} points at budget {top[0]} ({strips[0].short})"
    title = f"Preserving the function pays: r2r leads random padding by {lead}"
    title = title if where else "Preserving the function: no clear lead over random padding"
    text = "Random padding destroys the function at the growth, and what was learned is learned again. "
    if own is None:
        text += "Both have the rates that are best for r2r."
    else:
        more = leads_of(compared, ", at the rates that are best for r2r")
        theirs = more[0].cells[top[0]].value
        text += f"Each has the best rates of those tried for it; at those of r2r the lead is {abs(theirs):.1f} points there."
        late = [one for one in strips if "from nothing" in one.short]
        if late and not any(cell.clear for one in late for cell in one.cells.values()):
            text += " From nothing no difference is clear."
    figure, tone = f"{signed(top[1].value)}|points above random padding", "good" if where else "plain"
    return Finding(figure, title, text, tone, tuple(strips), tuple(more))


def leads_of(compared: Comparison, how: str = "") -> list[Strip]:
    """The lead of r2r over random padding in both accounts."""
    strips = []
    for account, title in ((REUSE, "reuse"), (NOTHING, "from nothing")):
        for what in ("deepen", "widen"):
            lines = (compared.lines.get(f"{account}-{what}-{way}") for way in ("r2r", "random"))
            place = f"{VERBS[what].lower()}, {title}{how}"
            strips += strip(f"{place}: r2r − random padding", *lines, short=place)
    return strips


def at_equal_flops(compared: Comparison, own: Comparison | None = None) -> Finding | None:
    """Does growth beat scratch, from nothing? Where it is otherwise by settings chosen from fewer pairs, that is said too."""
    strips, more = [], []
    for what in ("widen", "deepen"):
        ours = compared.lines.get(f"EQ-{what}-r2r")
        verb = VERBS[what].lower()
        strips += strip(f"{verb}, from nothing: r2r − scratch", ours, compared.scratch, f"{verb}: r2r − scratch")
        small = compared.small(NOTHING, what)
        strips += strip(f"{verb}, from nothing: r2r − small alone", ours, small, f"{verb}: r2r − small alone")
        budgets = ours.ends if ours else ()
        best = {f"{one:g}": found for one in budgets if (found := best_elsewhere(compared, NOTHING, what, "scratch", one))}
        more += [Strip(f"{verb}, from nothing: best way, chosen on other seeds, − scratch", best)] if best else []
    if not strips:
        return None
    judged = {one.name.split(",")[0]: one.cells for one in strips if "scratch" in one.name}
    last = min(one.value for cells in judged.values() for one in cells.values())
    parts = [f"{verb} {outcome(cells)}" for verb, cells in judged.items()]
    title = f"From nothing, by budget: {'; '.join(parts)}"
    others = {verb: by_budget(own.lines.get(f"EQ-{what}-r2r"), own.scratch) for what, verb in AS_VERBS.items()} if own else {}
    apart = [
        f"{verb} {signed(cells[budget].value)} at {budget}{'' if cells[budget].clear else ', not clear'}"
        for verb, cells in others.items()
        for budget in cells
        if verb in judged and budget in judged[verb] and cells[budget].clear is not judged[verb][budget].clear
    ]
    text = (
        f"With settings from {len(RIDGE)} pairs for each kind of run instead of the full grid: {'; '.join(apart)}."
        if apart
        else ""
    )
    return Finding(f"{signed(last)}|points against scratch at worst", title, text, "bad", tuple(strips), tuple(more))


def outcome(cells: Mapping[str, Estimate]) -> str:
    """beats scratch at 2 and loses at 16, 32, no clear difference at 4, 8"""
    better, worse = ahead(cells), ahead(cells, -1)
    parts = [f"beats scratch at {', '.join(better)}"] if better else []
    parts += [f"loses {'' if better else 'to scratch '}at {', '.join(worse)}"] if worse else []
    rest = [budget for budget in cells if budget not in (*better, *worse)]
    unclear = f"no clear difference{'' if parts else ' from scratch'} at {', '.join(rest)}" if rest else ""
    return ", ".join(filter(None, [" and ".join(parts), unclear]))


def schedules(compared: Comparison) -> Finding | None:
    """Whether the rate should follow FLOPs, or rise again after the growth."""
    strips = []
    for what in ("widen", "deepen"):
        plain = compared.lines.get(f"{NOTHING}-{what}-r2r")
        for schedule in SCHEDULES:
            line = compared.lines.get(f"{NOTHING}-{what}-r2r-{schedule}")
            if line is not None:
                name = f"{VERBS[what].lower()}, from nothing: {name_of(line)}, − r2r"
                strips += strip(name, line, plain, f"{VERBS[what].lower()}: {name_of(line).removeprefix('r2r, ')}")
    cells = [(one, budget, cell) for one in strips for budget, cell in one.cells.items()]
    if not cells:
        return None
    clear = [(one, budget, cell) for one, budget, cell in cells if cell.clear]
    top = max(cells, key=lambda item: item[2].value)[2].value
    number = f"{len(clear)} of {len(cells)} differences from one cosine over all steps"
    title = f"Other schedules after a growth: {number} {'is' if len(clear) == 1 else 'are'} clear"
    title += (
        f", and {remaining([cell.p for _, _, cell in cells]) or 'none'} when their number is corrected for" if clear else ""
    )
    text = "; ".join(f"{one.short} {signed(cell.value)} at {budget}" for one, budget, cell in clear)
    return Finding(f"{signed(top)}|points at most, by another schedule", title, text and f"{text}.", "plain", (), tuple(strips))


def to_the_end(compared: Comparison) -> Finding | None:
    """Compute to what the big network reaches, under reuse: by r2r, and by the best way chosen on other seeds."""
    parts, figure = [], None
    for what in ("widen", "deepen"):
        ours = compared.lines.get(f"RE-{what}-r2r")
        for title, target in list(compared.targets().items())[1:]:
            if ours is None:
                continue
            own, theirs = need(ours, compared.scratch, target), need(compared.scratch, compared.scratch, target)
            goal = f"{VERBS[what]}, {target:.1f} % ({title})"
            if own.at_once:
                parts.append(f"{goal}: the small network itself has it in {own.at_once} of {own.n} seeds.")
                continue
            best = saving_elsewhere(compared, compared.of(REUSE, what), target)
            r2r = share(own.saving) if own.saving else f"in {own.reached} of {own.n} seeds, scratch in {theirs.reached}"
            parts.append(
                f"{goal}: r2r {r2r}"
                + (f"; the best way, chosen on other seeds ({best[1]}), {share(best[0])}." if best else ".")
            )
            if own.saving is not None and figure is None:
                figure = own.saving, target, what
    if not parts:
        return None
    if figure is None:
        return Finding(
            "none|of it is reached in all seeds", "Compute to what the big network reaches, under reuse", "\n".join(parts)
        )
    one, target, what = figure
    amount = f"{abs(100 * one.value):.0f} % {'fewer' if one.value > 0 else 'more'} FLOPs"
    title = f"Under reuse, {VERBS[what].lower()} by r2r takes {amount} to "
    title += f"{target:.1f} %" + ("" if one.clear else ", no clear difference")
    return Finding(
        f"{signed(-100 * one.value, 0)} %|FLOPs to {target:.1f} %, reuse",
        title,
        "\n".join(parts),
        "good" if one.clear else "plain",
    )


def to_seventy(compared: Comparison) -> Finding | None:
    """Compute to 70 % from nothing: by growth, and by the small network alone."""
    parts, figure, takes, alones = [], -math.inf, list[str](), list[str]()
    for what in ("widen", "deepen"):
        best = saving_elsewhere(compared, compared.of(NOTHING, what), 70.0)
        ours = compared.lines.get(f"{NOTHING}-{what}-r2r")
        saving = best[0] if best else need(ours, compared.scratch, 70.0).saving if ours else None
        if saving is None:
            continue
        figure = max(figure, saving.value)
        takes.append(f"{VERBS[what].lower()} {fewer(saving.value)}")
        by = f"the best way chosen on other seeds ({best[1]})" if best else "r2r"
        parts.append(f"{VERBS[what]} from nothing, {by}: {share(saving)}.")
        small = compared.small(NOTHING, what)
        alone = need(small, compared.scratch, 70.0) if small else None
        if alone is not None and alone.saving is not None:
            alones.append(fewer(alone.saving.value))
            parts.append(f"The small network alone: {share(alone.saving)}.")
        reuse = compared.lines.get(f"RE-{what}-r2r")
        if reuse is not None and reuse.start and min(reuse.start.values()) >= 70:
            parts.append(f"Under reuse it is there at once: the small network has {start_of(reuse):.1f} %.")
    if not parts:
        return None
    title = f"FLOPs to 70 % from nothing, against scratch: {', '.join(takes)}"
    title += f"; the small networks alone {', '.join(alones)}" if alones else ""
    return Finding(f"{signed(-100 * figure, 0)} %|FLOPs to 70 %, from nothing", title, "\n".join(parts))


def holm(rows: list[Swept]) -> int:
    """How many of these differences remain when their number is corrected for."""
    return remaining([row.difference.p for row in rows if row.difference is not None])


def remaining(chances: Sequence[float]) -> int:
    """How many of these p are below 0.05 by Holm's correction."""
    chances = sorted(chances)
    return next((place for place, p in enumerate(chances) if p > 0.05 / (len(chances) - place)), len(chances))


def recommended(compared: Comparison) -> Finding | None:
    """What should change at a growth: whatever is clearly better than to change nothing, and what clearly harms."""
    tried = [row for row in compared.swept if row.difference is not None]
    if not tried:
        return None
    clear = [row for row in tried if row.difference is not None and row.difference.clear]
    better = [row for row in clear if row.difference is not None and row.difference.value > 0]
    worse = len(clear) - len(better)
    named = "; ".join(
        f"{SETTINGS[row.setting]} {row.value} ({VERBS[row.what].lower()}, {ACCOUNT_NAMES[row.account]}: "
        f"{signed(row.difference.value if row.difference else 0.0)})"
        for row in better
    )
    text = (
        f"Of {len(tried)} changes of learning rate, weight decay, scale, optimizer state and the rate of new units, by r2r, "
        f"{worse} are worse than none and {len(better)} better{f' ({named})' if named else ''}; {holm(tried)} differences "
        "remain when their number is corrected for (Holm), and the others are not clear. Rate and decay had been tuned for "
        "changing nothing."
    )
    if not better:
        text += (
            " So the library changes nothing by default: the optimizer's state is carried, rate and decay are left to the "
            "schedule, new weights have the deviation of those they join."
        )
    title = "Some changes help" if better else "Nothing that was changed at a growth has helped"
    return Finding(f"{worse} of {len(tried)}|changes do harm", title, text)


def opening(compared: Comparison) -> str:
    """The report's first sentence: what reuse by widening is worth, and when."""
    compared = fairest(compared)
    ours, small = compared.lines.get("RE-widen-r2r"), compared.small(REUSE, "widen")
    scratch, alone = by_budget(ours, compared.scratch), by_budget(ours, small)
    if not scratch or not alone:
        return "The results of the comparison at equal compute are incomplete."
    beats, gains = ahead(scratch), ahead(alone)
    first = f"ahead of starting over for up to {beats[-1]} epochs of compute" if beats else "not ahead of starting over"
    second = f"ahead of training it on as it is from {gains[0]} on" if gains else "no better than training it on as it is"
    worst = min(
        by_budget(compared.lines.get("EQ-widen-r2r"), compared.scratch).values(), key=lambda one: one.value, default=None
    )
    third = ""
    if worst is not None and worst.clear and worst.value < 0:
        third = f"; if its training has to be paid for, starting over ends up to {abs(worst.value):.1f} points higher"
    return f"A trained small network that is widened is {first}, and {second}{third}."


def answers(compared: Comparison) -> list[Finding]:
    """From every way tuned for itself, where those runs were made; from the others where they alone can answer."""
    own, fair = own_of(compared), fairest(compared)
    found = [
        *(reused(what)(fair) for what in ("widen", "deepen")),
        preserving(compared),
        to_the_end(fair),
        at_equal_flops(fair, own),
        schedules(own or compared),
        to_seventy(fair),
        recommended(compared),
    ]
    return [one for one in found if one is not None]
