"""What the honest comparison answers, in words: every number and every verdict is computed from the results.

A difference is called one when its 95 % interval over seeds leaves zero out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.comparison import Comparison, Line, gain, gap, need
from experiments.curves import Estimate
from experiments.findings import Finding, share, signed
from experiments.parts import ACCOUNT_NAMES
from experiments.ways import SETTINGS, VERBS, name_of, start_of


def verdict(gaps: Mapping[float, Estimate]) -> str:
    """better at 2 (+2.1), worse at 8, 16 (−1.0, −1.1), no clear difference at 4"""
    better, worse = ([budget for budget, one in gaps.items() if one.clear and one.value * sign > 0] for sign in (1, -1))
    rest = [budget for budget in gaps if budget not in (*better, *worse)]
    parts = []
    for name, there in (("better", better), ("worse", worse), ("no clear difference", rest)):
        values = f" ({', '.join(signed(gaps[budget].value) for budget in there)})" if there is not rest else ""
        parts += [f"{name} at {', '.join(f'{budget:g}' for budget in there)}{values}"] if there else []
    return ", ".join(parts)


def best_of(lines: Sequence[Line], other: Line, budget: float) -> tuple[Line, Estimate] | None:
    """The line that is best at a budget, and how much better than another line it is."""
    gaps = [(line, one) for line in lines if (one := gap(line, other, budget))]
    return max(gaps, key=lambda pair: pair[1].value) if gaps else None


def against(compared: Comparison, account: str, what: str) -> dict[str, dict[float, Estimate]]:
    """The best way at each budget (by its mean), against its rivals."""
    small = compared.small(account, what)
    found: dict[str, dict[float, Estimate]] = {"scratch": {}, "alone": {}, "had": {}}
    for budget in compared.scratch.ends:
        best = best_of(compared.of(account, what), compared.scratch, budget)
        if best is None:
            continue
        line, found["scratch"][budget] = best
        alone = gap(line, small, budget) if small else None
        had = gain(line, small, budget) if small else None
        found["alone"] |= {budget: alone} if alone else {}
        found["had"] |= {budget: had} if had else {}
    return found


def wins(gaps: Mapping[float, Estimate]) -> list[float]:
    return [budget for budget, one in gaps.items() if one.clear and one.value > 0]


def at_equal_flops(compared: Comparison) -> Finding | None:
    """Does growth ever beat scratch, from nothing?"""
    told, won = [], dict[float, float]()
    for what in ("widen", "deepen", "both"):
        found = against(compared, "EQ", what)
        if not found["scratch"]:
            continue
        won |= {budget: max(won.get(budget, 0.0), found["scratch"][budget].value) for budget in wins(found["scratch"])}
        told.append(f"{VERBS[what]}, the best way at each budget, against scratch: {verdict(found['scratch'])}")
        told[-1] += f"; against the small network alone: {verdict(found['alone'])}." if found["alone"] else "."
    if not told:
        return None
    where = ", ".join(f"{budget:g}" for budget in sorted(won))
    return Finding(
        f"{signed(max(won.values()))}|points at best" if won else "0|clear wins",
        f"From nothing, growth beats scratch at budgets {where}" if won else "From nothing, growth never beats scratch",
        " ".join(told),
        "plain" if won else "bad",
    )


def reused(compared: Comparison) -> Finding | None:
    """What reuse buys: against scratch, against the small network that one had, and against training that one on."""
    told, best, pays = [], -math.inf, []
    for what in ("widen", "deepen"):
        found = against(compared, "RE", what)
        if not found["alone"]:
            continue
        best = max(best, *(one.value for one in found["alone"].values()))
        if won := wins(found["alone"]):
            pays.append(f"{VERBS[what].lower()} at {', '.join(f'{budget:g}' for budget in won)}")
        told.append(
            f"{VERBS[what]}, the best way at each budget, against scratch: {verdict(found['scratch'])}; against the small "
            f"network trained on for as many FLOPs: {verdict(found['alone'])}; against the small network that was there: "
            f"{verdict(found['had'])}."
        )
    if not told:
        return None
    title = f"growth beats training the small network on: {'; '.join(pays)}" if pays else "no better than to train on"
    return Finding(f"{signed(best)}|points above the small network trained on, at best", f"Reuse: {title}", " ".join(told))


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
        small = compared.small("EQ", what)
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
    told, figure = [], ("none", "of it is reached by growth in all seeds")
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
            if not best.at_once:
                figure = (
                    f"{100 * best.saving.value:.0f} %",
                    f"fewer FLOPs to {target:.1f} %, {VERBS[what].lower()}, under reuse",
                )
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
            f" {'In the middle of a schedule nothing' if better else 'Nothing'} is better than to change nothing, and that is "
            "what the library does by default: the optimizer's state is carried, rate and decay are left to the schedule, new "
            "weights have the deviation of those they join."
        )
    text += f" With so many comparisons, about {0.025 * len(tried):.0f} would look better by chance."
    title = "Some changes help" if not nothing else "In a schedule, change nothing at a growth" if better else ""
    return Finding(f"{worse} of {len(tried)}|changes do harm", title or "Change nothing at a growth", text)


ANSWERS = (to_seventy, to_the_end, reused, at_equal_flops, recommended)


def answers(compared: Comparison) -> list[Finding]:
    return [found for answer in ANSWERS if (found := answer(compared)) is not None]
