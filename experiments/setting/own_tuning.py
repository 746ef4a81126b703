"""The comparison in which every way and every budget is tuned for itself, with the same effort.

In the comparison of `protocol.py`, grown runs are tuned with r2r and budgets above 8 take over what was best at 8. Here each
kind of run, which is one line of the comparison, is tuned at each of its budgets: six pairs of peak rate and weight decay, the
same for all kinds, each with two seeds up to budget 8 and one beyond, on held-out images. At 16 and 32 three pairs are tried:
of a kind that has been tuned at 8, those that were best for it there. Runs that grow twice are left out, and ways other than
r2r and other schedules of the rate are compared at some budgets only.

The pairs lie where the full grid of `protocol.py` has its ridge: there accuracy depends on rate × decay first, which is best
near 0.002, and on their ratio little. Under reuse at budgets up to 4 low rates are best for ways that preserve the function,
and high ones may be for the others: there the pairs are one per rate; at 16 the ways other than r2r try the upper half of them.

Lines have the names of `protocol.py`, files the prefix OWN. A run that the comparison of `protocol.py` has under another name
is not trained again: readers find it by its description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from experiments.setting.arms import Arm
from experiments.setting.protocol import (
    BIG,
    BUDGETS,
    GRID,
    METHODS,
    OWNED,
    REUSED,
    SMALL,
    Chosen,
    Tuned,
    from_nothing,
    protocol_arms,
    reuse,
    scratch,
    tuning_name,
)
from experiments.setting.schedules import SCHEDULES

PREFIX = "OWN-"
Pair = tuple[float, float]  # peak rate and weight decay
RIDGE = ((4e-3, 0.2), (8e-3, 0.05), (8e-3, 0.2), (1.6e-2, 0.05), (1.6e-2, 0.2), (3.2e-2, 0.05))
REUSED_BRIEFLY = ((5e-4, 0.5), (1e-3, 0.5), (2e-3, 0.5), (4e-3, 0.2), (8e-3, 0.2), (1.6e-2, 0.05))
BRIEF = 4  # the longest budget with the lower rates under reuse
SEEDS = {1: 2, 2: 2, 4: 2, 8: 2, 16: 1, 32: 1}  # by budget
NARROWED_AT, LEFT = 8, 3  # at longer budgets so many of the pairs are tried: those that were best at this one
WAYS_AT = {"EQ": (8,), "RE": (1, 4, 16)}  # budgets of the ways other than r2r
SCHEDULED_AT = (8, 16)  # budgets of other schedules of the rate


@dataclass(frozen=True)
class Kind:
    """A line of the comparison. `name` is that of its tuning; `make` makes its arm from a name, a budget and settings."""

    name: str
    line: str
    budgets: tuple[int, ...]
    make: Callable[[str, float, Chosen], Arm]

    def pairs(self, budget: float) -> tuple[Pair, ...]:
        if not self.line.startswith("RE"):
            return RIDGE
        if budget <= BRIEF:
            return REUSED_BRIEFLY
        return RIDGE if NARROWED_AT in self.budgets else REUSED_BRIEFLY[-LEFT:]


def kinds() -> list[Kind]:
    found = [Kind("scratch", "EQ-scratch", tuple(sorted({*BUDGETS, *REUSED})), lambda *how: scratch(how[0], BIG, *how[1:]))]
    for what in SMALL:
        found += [small(what), nothing(what, "r2r"), *(scheduled(what, schedule) for schedule in SCHEDULES)]
        found += [reused(what, None), reused(what, "r2r")]
        others = [method for method in METHODS[what] if method != "r2r"]
        found += [kind(what, method) for method in others for kind in (nothing, reused)]
    return found


def small(what: str) -> Kind:
    return Kind(f"small-{what}", f"EQ-small-{what}", BUDGETS, lambda name, *how: scratch(name, SMALL[what], *how))


def nothing(what: str, method: str) -> Kind:
    name, budgets = (f"{what}-nothing", BUDGETS) if method == "r2r" else (f"{what}-nothing-{method}", WAYS_AT["EQ"])
    return Kind(name, f"EQ-{what}-{method}", budgets, lambda name, *how: from_nothing(name, what, method, *how))


def scheduled(what: str, schedule: str) -> Kind:
    def make(name: str, budget: float, chosen: Chosen) -> Arm:
        return SCHEDULES[schedule](from_nothing(name, what, "r2r", budget, chosen))

    return Kind(f"{what}-{schedule}", f"EQ-{what}-r2r-{schedule}", SCHEDULED_AT, make)


def reused(what: str, method: str | None) -> Kind:
    """Grown by a method, or trained on as it is."""
    name = f"{what}-on" if method is None else f"{what}-reuse" if method == "r2r" else f"{what}-reuse-{method}"
    line = f"RE-small-{what}" if method is None else f"RE-{what}-{method}"
    budgets = REUSED if method in (None, "r2r") else WAYS_AT["RE"]
    return Kind(name, line, budgets, lambda name, *how: reuse(name, what, method, *how))


KINDS = tuple(kinds())
Own = Mapping[str, Mapping[float, Chosen]]  # for each kind, by budget; those alone whose tuning is complete


def tuning_arms(results: Mapping[str, Any]) -> list[Arm]:
    """Every kind at every budget with every pair that is tried there, less what the tuning of `protocol.py` has.

    Args:
        results: of the tuning so far, by which longer budgets are narrowed down.
    """
    there = {tuning_name(*one) for one in GRID}
    arms = [
        kind.make(tuning_name(kind.name, budget, *pair), budget, Chosen(*pair))
        for kind in KINDS
        for budget in kind.budgets
        for pair in tried(results, kind, budget)
    ]
    return [arm for arm in arms if arm.name not in there]


def tried(results: Mapping[str, Any], kind: Kind, budget: int) -> list[Pair]:
    """The pairs of a kind at a budget: beyond 8 the best ones at 8, where the same pairs have been tried there."""
    pairs = list(kind.pairs(budget))
    if budget <= NARROWED_AT or NARROWED_AT not in kind.budgets or kind.pairs(NARROWED_AT) != kind.pairs(budget):
        return pairs
    scores = scores_of(results, kind, NARROWED_AT, pairs)
    best = sorted(scores, key=lambda pair: -scores[pair])[:LEFT]
    return [pair for pair in pairs if pair in best] if scores else pairs


def scores_of(results: Mapping[str, Any], kind: Kind, budget: int, pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Held-out accuracy of each pair; nothing unless all of them have all seeds of that budget."""
    seeds = [str(seed) for seed in range(SEEDS[budget])]
    found = {}
    for pair in pairs:
        curves = results.get(tuning_name(kind.name, budget, *pair), {"curves": {}})["curves"]
        if not all(seed in curves for seed in seeds):
            return {}
        found[pair] = mean(curves[seed][-1]["accuracy"][-1] for seed in seeds)
    return found


def chosen(results: Mapping[str, Any]) -> dict[str, dict[float, Chosen]]:
    """The best pair of each kind at each budget by held-out accuracy, where all its pairs have all seeds of that budget."""
    found: dict[str, dict[float, Chosen]] = {}
    for kind in KINDS:
        for budget in kind.budgets:
            scores = scores_of(results, kind, budget, tried(results, kind, budget))
            if scores:
                best = max(scores, key=lambda pair: scores[pair])
                found.setdefault(kind.name, {})[budget] = Chosen(*best)
    return found


def line_arms(own: Own) -> dict[str, dict[float, Arm]]:
    """The arms of each line by budget."""
    return {
        kind.line: {budget: kind.make(f"{PREFIX}{kind.line}@{budget}", budget, one) for budget, one in own[kind.name].items()}
        for kind in KINDS
        if kind.name in own
    }


def own_arms(own: Own, tuned: Tuned) -> list[Arm]:
    """What is to be trained besides the arms of `protocol.py`."""
    there = {description(asdict(arm)) for arm in protocol_arms(tuned)}
    arms = [arm for line in line_arms(own).values() for arm in line.values()]
    return [arm for arm in arms if description(asdict(arm)) not in there]


def any_choice() -> dict[str, dict[float, Chosen]]:
    """Some settings for all kinds and budgets, for the names of arms."""
    return {kind.name: dict.fromkeys(kind.budgets, OWNED) for kind in KINDS}


def description(arm: Mapping[str, Any]) -> str:
    """What an arm trains, whatever its name is. Fields at zero are left out: older files may lack them."""
    return json.dumps(without_zeros({**arm, "name": 0, "paper": 0}), sort_keys=True)


def without_zeros(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: without_zeros(one) for name, one in value.items() if one is not None and one not in (0, 0.0)}
    return [without_zeros(one) for one in value] if isinstance(value, list | tuple) else value
