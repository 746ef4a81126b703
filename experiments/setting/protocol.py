"""An honest comparison: does growing pay? Each kind of run is tuned, rates decay, five budgets, paired seeds.

The paper compares curves of runs whose rate drops once or never; there a grown network looks fast because everything before the
end of training does. Here every run is a whole run: AdamW, mirrored images, and a cosine that ends where the run ends.

Big is ResNetCifar-18(1/4). It is reached by widening 18(1/8) by two, by deepening 10(1/4), or from 10(1/8) by both. A budget is
counted in epochs of the big network's FLOPs (forward and backward, as torch counts them). Two accounts:

- *from nothing*: a share of the budget is spent on the small network, the rest, after the growth, on the big one; one cosine
  over both. Against the big network from scratch, and the small one, for as many FLOPs.
- *reuse*: the small network is there, trained to the end for 30 epochs; the budget begins with the growth, with a cosine of its
  own. Against the big network from scratch, and the small one trained on, for as many FLOPs.

Three sets of arms, in this order: `tuning` chooses rate and weight decay for each kind of run, at each budget up to 8, on
5,000 training images that are held out; `sweep` asks there how rate, weight decay, scale of drawn values, optimizer state and
the rate of new units should change at a growth; `protocol` then looks at the test set.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.reading.result_files import ResultsError, read_all
from experiments.setting.arms import Arm, Grow, Stage
from experiments.setting.flops import step_flops
from experiments.setting.models import Net

BIG = Net(r=1 / 4)
SMALL = {"widen": Net(r=1 / 8), "deepen": Net(r=1 / 4, blocks=2)}
TEACHER = 30  # epochs of the small network that is reused
BUDGETS = (2, 4, 8, 16, 32)
REUSED = (1, 2, 4, 8, 16)
METHODS = {
    "widen": ("r2r", "net2net", "netmorph", "copies", "fade", "random"),
    "deepen": ("r2r", "r2r-paper", "copy", "fade", "random"),
}
FADED = {"widen": "random", "deepen": "copy"}  # what comes in by a fade
FADE = 200  # steps of it
FIRST = {"deepen-first": ("deepen", "widen"), "widen-first": ("widen", "deepen")}
SHARE = 0.25  # of the budget that the small network gets
OTHER_SHARES = (0.1, 0.5)
RATES = {"EQ": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), "RE": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)}
DECAYS = (0.01, 0.05, 0.2, 0.5)
TUNED_UP_TO = 8  # budgets; longer ones take over what is best at this one
SWEPT_AT = {"EQ": 8, "RE": 4}


@dataclass(frozen=True)
class Chosen:
    """Peak rate and weight decay."""

    rate: float
    decay: float


OWNED = Chosen(8e-3, 0.2)  # how the small network was trained that is reused
Tuned = Mapping[str, Mapping[float, Chosen]]  # for each kind of run, by budget


def at(tuned: Tuned, kind: str, budget: float) -> Chosen:
    """What is used at a budget."""
    own = tuned[kind]
    return own[min(budget, max(own))]


@cache
def cost(net: Net) -> int:
    """FLOPs of a step, an image."""
    return step_flops(net.build(0))[0]


def epochs(net: Net, budget: float) -> float:
    """How many epochs of a network a budget pays for."""
    return budget * cost(BIG) / cost(net)


def run(name: str, net: Net, *stages: Stage, own: int = 0) -> Arm:
    return Arm(name, net, stages, own, optimizer="adamw", flips=True)


def scratch(name: str, net: Net, budget: float, chosen: Chosen) -> Arm:
    length = epochs(net, budget)
    return run(name, net, Stage(length, chosen.rate, chosen.decay, span=length, looks=0))


def growth(what: str, method: str) -> Grow:
    return Grow(what, FADED[what], factor=2, fade=FADE) if method == "fade" else Grow(what, method, factor=2)


def grown(net: Net, grow: Grow) -> Net:
    return replace(net, r=net.r * grow.factor) if grow.what == "widen" else replace(net, blocks=2 * net.blocks)


def from_nothing(name: str, what: str, method: str, budget: float, chosen: Chosen, share: float = SHARE) -> Arm:
    small = SMALL[what]
    first, second = epochs(small, share * budget), (1 - share) * budget
    early = Stage(first, chosen.rate, chosen.decay, span=first + second, looks=0)
    return run(name, small, early, replace(early, epochs=second, grow=growth(what, method), state="kept"))


def twice(name: str, order: str, budget: float, chosen: Chosen) -> Arm:
    """From a network of half the width and depth, by two growths, the small ones together with the share of the one above."""
    grows = [growth(what, "r2r") for what in FIRST[order]]
    nets = [Net(r=1 / 8, blocks=2)]
    for grow in grows:
        nets.append(grown(nets[-1], grow))
    shares = SHARE / 2, SHARE / 2, 1 - SHARE
    lengths = [epochs(net, share * budget) for net, share in zip(nets, shares, strict=True)]
    stages = [Stage(length, chosen.rate, chosen.decay, None, "kept", span=sum(lengths), looks=0) for length in lengths]
    later = [replace(stage, grow=grow) for stage, grow in zip(stages[1:], grows, strict=True)]
    return run(name, nets[0], stages[0], *later)


def reuse(name: str, what: str, method: str | None, budget: float, chosen: Chosen) -> Arm:
    """The small network that is there is grown and trained on; without a method, it is trained on as it is."""
    first = Stage(TEACHER, OWNED.rate, OWNED.decay, span=TEACHER, looks=0)
    length = epochs(BIG if method else SMALL[what], budget)
    grow = growth(what, method) if method else None
    second = Stage(length, chosen.rate, chosen.decay, grow, "kept", span=length, looks=0)
    return run(name, SMALL[what], first, second, own=1)


KINDS = (
    "scratch",
    *(f"small-{what}" for what in SMALL),
    *(f"{what}-{how}" for what in SMALL for how in ("nothing", "reuse", "on")),
    "both-nothing",
)


def typical(kind: str, name: str, budget: float, chosen: Chosen) -> Arm:
    """The run by which its kind is tuned."""
    first, _, second = kind.partition("-")
    if kind == "scratch":
        return scratch(name, BIG, budget, chosen)
    if kind == "both-nothing":
        return twice(name, "deepen-first", budget, chosen)
    if first == "small":
        return scratch(name, SMALL[second], budget, chosen)
    if second == "nothing":
        return from_nothing(name, first, "r2r", budget, chosen)
    return reuse(name, first, "r2r" if second == "reuse" else None, budget, chosen)


def account_of(kind: str) -> str:
    return "RE" if kind.endswith(("-reuse", "-on")) else "EQ"


def tuned_at(kind: str) -> list[int]:
    """The budgets at which a kind of run is tuned: scratch is a rival in both accounts."""
    budgets = {
        *(BUDGETS if account_of(kind) == "EQ" else ()),
        *(REUSED if account_of(kind) == "RE" or kind == "scratch" else ()),
    }
    return sorted(budget for budget in budgets if budget <= TUNED_UP_TO)


GRID = [
    (kind, budget, rate, decay)
    for kind in KINDS
    for budget in tuned_at(kind)
    for rate in RATES[account_of(kind)]
    for decay in DECAYS
]


def tuning_name(kind: str, budget: float, rate: float, decay: float) -> str:
    return f"TUNE-{kind}@{budget:g}-{rate:g}-{decay:g}"


def tuning_arms() -> list[Arm]:
    """Every kind of run at every rate and weight decay."""
    return [typical(one[0], tuning_name(*one), one[1], Chosen(*one[2:])) for one in GRID]


def lacks(results: Container[str]) -> str:
    """What is missing in results of the tuning, in words; nothing, if they are complete."""
    missing = [tuning_name(*one) for one in GRID if tuning_name(*one) not in results]
    others = len(missing) - 1
    return "".join(missing[:1]) + (f" and {others} other{'s' if others > 1 else ''}" if others > 0 else "")


def chosen_by(folder: Path) -> dict[str, dict[float, Chosen]]:
    return chosen_from(read_all(folder) if any(folder.glob("*.json")) else {}, folder)


def chosen_from(results: Mapping[str, Any], folder: Path) -> dict[str, dict[float, Chosen]]:
    """The best rate and weight decay of each kind at each budget, by the mean over seeds of the last held-out accuracy."""
    lacking = lacks(results)
    if lacking:
        raise ResultsError(f"{folder} lacks {lacking}: run python -m experiments --set tuning first")
    best: dict[tuple[str, float], tuple[float, Chosen]] = {}
    for one in GRID:
        kind, budget, *settings = one
        score = mean(stages[-1]["accuracy"][-1] for stages in results[tuning_name(*one)]["curves"].values())
        if score > best.get((kind, budget), (-1.0,))[0]:
            best[kind, budget] = score, Chosen(*settings)
    return {kind: {budget: best[kind, budget][1] for budget in tuned_at(kind)} for kind in KINDS}


SWEEP: dict[str, tuple[float | str, ...]] = {
    "rate": (0.2, 0.5, 1.0, 2.0),  # factors on what was chosen, from the growth on
    "decay": (0.2, 1.0, 5.0),
    "scale": (0.1, 0.3, 1.0, 2.0),
    "state": ("kept", "fresh"),
    "new_rate": (0.5, 1.0, 2.0, 4.0),
}


def sweep_arms(tuned: Tuned) -> list[Arm]:
    """One thing at a time changed at the growth, in both accounts."""
    arms = []
    for what in SMALL:
        for account, budget in (("nothing", SWEPT_AT["EQ"]), ("reuse", SWEPT_AT["RE"])):
            kind = f"{what}-{account}"
            plain = typical(kind, "", budget, at(tuned, kind, budget))
            for setting, values in SWEEP.items():
                for value in values if (what, setting) != ("deepen", "scale") else ():  # a branch that is closed has none
                    last = changed(plain.stages[-1], setting, value)
                    name = f"SWEEP-{kind}-{setting}-{value}"
                    arms.append(replace(plain, name=name, stages=(*plain.stages[:-1], last)))
    return arms


def changed(stage: Stage, setting: str, value: float | str) -> Stage:
    assert stage.grow is not None
    if setting == "state":
        return replace(stage, state=str(value))
    number = float(value)
    if setting == "scale":
        return replace(stage, grow=replace(stage.grow, scale=number))
    if setting == "new_rate":
        return replace(stage, new_rate=number)
    return replace(stage, **{setting: number * getattr(stage, setting)})


def protocol_arms(tuned: Tuned) -> list[Arm]:
    """All budgets, methods and shares, and what they are compared with."""
    arms = [
        scratch(f"EQ-scratch@{budget}", BIG, budget, at(tuned, "scratch", budget)) for budget in sorted({*BUDGETS, *REUSED})
    ]
    for what, methods in METHODS.items():
        for budget in BUDGETS:
            picked = at(tuned, f"{what}-nothing", budget)
            arms.append(typical(f"small-{what}", f"EQ-small-{what}@{budget}", budget, at(tuned, f"small-{what}", budget)))
            arms += [from_nothing(f"EQ-{what}-{method}@{budget}", what, method, budget, picked) for method in methods]
            for share in OTHER_SHARES:
                arms.append(from_nothing(f"EQ-{what}-r2r-{share:g}@{budget}", what, "r2r", budget, picked, share))
        for budget in REUSED:
            picked = at(tuned, f"{what}-reuse", budget)
            arms.append(typical(f"{what}-on", f"RE-small-{what}@{budget}", budget, at(tuned, f"{what}-on", budget)))
            arms += [reuse(f"RE-{what}-{method}@{budget}", what, method, budget, picked) for method in methods]
    for budget in BUDGETS:
        picked = at(tuned, "both-nothing", budget)
        arms += [twice(f"EQ-both-{order}@{budget}", order, budget, picked) for order in FIRST]
    return arms
