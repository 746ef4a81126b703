"""What the honest comparison answers, in words: every number and every verdict is computed from the results.

A way is called better or worse than a rival where its 95 % interval over seeds leaves zero out; the best of several ways is
called better only where p times their number is below 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.pages.parts import ACCOUNT_NAMES
from experiments.reading.comparison import Best, Comparison, Swept, against, need, wins
from experiments.reading.curves import Estimate
from experiments.reading.findings import Finding, share, signed
from experiments.reading.ways import SETTINGS, VERBS, name_of, start_of


def verdict(found: Mapping[float, Best]) -> str:
    """better at 2, worse at 8, 16, no clear difference at 4"""
    kinds: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
    for budget, one in found.items():
        kinds["no clear difference" if not one.clear else "better" if one.gap.value > 0 else "worse"].append(f"{budget:g}")
    return ", ".join(f"{kind} at {', '.join(there)}" for kind, there in kinds.items() if there)


def both(compared: Comparison, account: str, what: str, rival: str) -> str:
    """What r2r does against a rival, and the best way."""
    ours, best = (against(compared, account, what, way)[rival] for way in ("r2r", ""))
    most = max((one.tried for one in best.values()), default=0)
    return "; ".join([*([f"r2r {verdict(ours)}"] if ours else []), f"the best of {most} ways {verdict(best)}"])


def at_equal_flops(compared: Comparison) -> Finding | None:
    """Does growth ever beat scratch, from nothing?"""
    told, won = [], list[tuple[float, float, Best | None]]()
    for what in ("widen", "deepen", "both"):
        best = against(compared, "EQ", what)
        if not best["scratch"]:
            continue
        won += [(best["scratch"][budget].gap.value, budget, best["alone"].get(budget)) for budget in wins(best["scratch"])]
        told.append(f"{VERBS[what]} against scratch: {both(compared, 'EQ', what, 'scratch')}.")
        if best["alone"]:
            told.append(f"Against the small network alone, the best way {verdict(best['alone'])}.")
    if not told:
        return None
    if not won:
        return Finding("0|clear wins", "From nothing, growth never beats scratch", " ".join(told), "bad")
    value, _, alone = max(won, key=lambda one: one[0])
    beside = f", {signed(alone.gap.value)} against the small network" if alone else ""
    where = ", ".join(f"{budget:g}" for budget in sorted({budget for _, budget, _ in won}))
    title = f"From nothing, growth beats scratch at budgets {where}"
    return Finding(f"{signed(value)}|points against scratch at best{beside}", title, " ".join(told), "plain")


def reused(compared: Comparison) -> Finding | None:
    """What reuse buys: against scratch, and against training the small network on."""
    told, most, pays = [], -math.inf, []
    for what in ("widen", "deepen"):
        best = against(compared, "RE", what)
        if not best["alone"]:
            continue
        most = max(most, *(one.gap.value for one in best["alone"].values()))
        if won := wins(best["alone"]):
            pays.append(f"{VERBS[what].lower()} at {', '.join(f'{budget:g}' for budget in won)}")
        told.append(f"{VERBS[what]} against scratch: {both(compared, 'RE', what, 'scratch')}.")
        told.append(f"Against the small network, trained on for as many FLOPs: {both(compared, 'RE', what, 'alone')}.")
    if not told:
        return None
    title = f"growth beats training the small network on: {'; '.join(pays)}" if pays else "no better than to train on"
    return Finding(f"{signed(most)}|points above the small network trained on, at best", f"Reuse: {title}", " ".join(told))


def to_seventy(compared: Comparison) -> Finding | None:
    told, figure, rival = [], 0.0, 0.0
    for what in ("widen", "deepen"):
        found = [one for line in compared.of("EQ", what) if (one := need(line, compared.scratch, 70.0)).saving is not None]
        if not found:
            continue
        best = max(found, key=lambda one: one.saving.value if one.saving else -math.inf)
        assert best.saving is not None
        figure = max(figure, best.saving.value)
        told.append(f"{VERBS[what]} from nothing, {name_of(compared.lines[best.line])}: {share(best.saving)}.")
        small = compared.small("EQ", what)
        alone = need(small, compared.scratch, 70.0) if small else None
        if alone is not None and alone.saving is not None:
            rival = max(rival, alone.saving.value)
            told.append(f"The small network alone: {share(alone.saving)}.")
        reuse = compared.lines.get(f"RE-{what}-r2r")
        if reuse is not None and reuse.start and min(reuse.start.values()) >= 70:
            told.append(f"Under reuse it is there at once: the small network has {start_of(reuse):.1f} %.")
    if not told:
        return None
    beside = f"; small alone {100 * rival:.0f} %" if rival else ""
    return Finding(f"{100 * figure:.0f} %|fewer FLOPs to 70 %, from nothing{beside}", "Compute to 70 %", " ".join(told))


def to_the_end(compared: Comparison) -> Finding | None:
    """Compute to what the big network reaches, under reuse: by the best way, and by r2r."""
    told, figure = [], ("none", "of it is reached by growth in all seeds")
    for what in ("widen", "deepen"):
        for title, target in list(compared.targets().items())[1:]:
            found = {line.way: need(line, compared.scratch, target) for line in compared.of("RE", what)}
            goal, own = f"{VERBS[what]}, {target:.1f} % ({title})", need(compared.scratch, compared.scratch, target)
            if not found:
                continue
            there = max(one.at_once for one in found.values())
            whole = [one for one in found.values() if one.saving is not None]
            if there:
                told.append(f"{goal}: the small network itself has it in {there} of {own.n} seeds.")
            elif not whole:
                most = max(one.reached for one in found.values())
                told.append(f"{goal}: in {most} of {own.n} seeds at most; from scratch in {own.reached}.")
            else:
                best = max(whole, key=lambda one: one.saving.value if one.saving else -math.inf)
                assert best.saving is not None
                ours = found.get("r2r")
                r2r = "" if ours is None or ours is best else f"; r2r {told_of(ours.saving, ours.reached, ours.n)}"
                told.append(f"{goal}: {share(best.saving)} ({name_of(compared.lines[best.line])}{r2r}).")
                figure = (
                    f"{100 * best.saving.value:.0f} %",
                    f"fewer FLOPs to {target:.1f} %, {VERBS[what].lower()}, under reuse",
                )
    if not told:
        return None
    return Finding("|".join(figure), "Compute to what the big network reaches, under reuse", " ".join(told))


def told_of(saving: Estimate | None, reached: int, n: int) -> str:
    return share(saving) if saving is not None else f"in {reached} of {n} seeds"


def holm(rows: list[Swept]) -> int:
    """How many of these differences remain when their number is corrected for."""
    chances = sorted(row.difference.p for row in rows if row.difference is not None)
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


def in_short(compared: Comparison) -> str:
    """A sentence on each account."""
    ends, said = to_the_end(compared), []
    if ends is not None and "%" in ends.figure:
        number, what = ends.figure.split("|")
        said.append(f"With rates that are tuned and decayed, at best {number} {what}.")
    for what in ("widen", "deepen"):
        if found := against(compared, "EQ", what)["scratch"]:
            said.append(f"{VERBS[what]} from nothing, the best way against scratch, by budget in epochs: {verdict(found)}.")
    return " ".join(said)


ANSWERS = (to_seventy, to_the_end, reused, at_equal_flops, recommended)


def answers(compared: Comparison) -> list[Finding]:
    return [found for answer in ANSWERS if (found := answer(compared)) is not None]
