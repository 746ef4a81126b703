"""An honest comparison: does growing pay? Each kind of run is tuned, rates decay, five budgets, paired seeds.

The paper compares curves of runs whose rate never decays; there a grown network looks fast because everything before the end of
training does. Here every run is a whole run: AdamW, mirrored images, and a cosine that ends where the run ends.

Big is ResNetCifar-18(1/4). It is reached by widening 18(1/8) by two, by deepening 10(1/4), or from 10(1/8) by both. A budget is
counted in epochs of the big network's FLOPs (forward and backward, as torch counts them). Two accounts:

- *from nothing*: a share of the budget is spent on the small network, the rest, after the growth, on the big one; one cosine
  over both. Against the big network from scratch, and the small one, for as many FLOPs.
- *reuse*: the small network is there, trained to the end for 30 epochs; the budget begins with the growth, with a cosine of its
  own. Against the big network from scratch for as many FLOPs.

Three sets of arms, in this order: `tuning` chooses rate and weight decay for each kind of run, on 5,000 training images that
are held out; `sweep` asks there how rate, weight decay, scale of drawn values, optimizer state and the rate of new units
should change at a growth; `protocol` then looks at the test set, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

from experiments.arms import Arm, Grow, Stage
from experiments.flops import step_flops
from experiments.models import Net
from experiments.results import ResultsError, read_all

BIG = Net(r=1 / 4)
SMALL = {"widen": Net(r=1 / 8), "deepen": Net(r=1 / 4, blocks=2)}
TEACHER = 30  # epochs of the small network that is reused
BUDGETS = (2, 4, 8, 16, 32)
REUSED = (1, 2, 4, 8, 16)
METHODS = {
    "widen": ("r2r", "net2net", "netmorph", "copies", "random"),
    "deepen": ("r2r", "r2r-paper", "copy", "fade", "random"),
}
FADE = 200  # steps over which copied blocks come in
FIRST = {"deepen-first": ("deepen", "widen"), "widen-first": ("widen", "deepen")}
SHARE = 0.25  # of the budget that the small network gets
OTHER_SHARES = (0.1, 0.5)
RATES, DECAYS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), (0.01, 0.05, 0.2)
TUNED_AT, SWEPT_AT = 8, 4  # budgets


@dataclass(frozen=True)
class Chosen:
    """Peak rate and weight decay."""

    rate: float = 4e-3
    decay: float = 0.05


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
    return Grow(what, "copy", factor=2, fade=FADE) if method == "fade" else Grow(what, method, factor=2)


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


def reuse(name: str, what: str, method: str, budget: float, chosen: Chosen, teacher: Chosen) -> Arm:
    first = Stage(TEACHER, teacher.rate, teacher.decay, span=TEACHER, looks=0)
    second = Stage(budget, chosen.rate, chosen.decay, growth(what, method), "kept", span=budget, looks=0)
    return run(name, SMALL[what], first, second, own=1)


def kinds(chosen: Mapping[str, Chosen], budget: float) -> dict[str, Arm]:
    """One run of each kind that is tuned by itself."""
    arms = {"scratch": scratch("scratch", BIG, budget, chosen["scratch"])}
    for what in SMALL:
        arms[f"small-{what}"] = scratch(f"small-{what}", SMALL[what], budget, chosen[f"small-{what}"])
        arms[f"{what}-nothing"] = from_nothing(f"{what}-nothing", what, "r2r", budget, chosen[f"{what}-nothing"])
        arms[f"{what}-reuse"] = reuse(f"{what}-reuse", what, "r2r", budget / 2, chosen[f"{what}-reuse"], Chosen())
    arms["both-nothing"] = twice("both-nothing", "deepen-first", budget, chosen["both-nothing"])
    return arms


KINDS = (
    "scratch",
    *(f"small-{what}" for what in SMALL),
    *(f"{what}-{account}" for what in SMALL for account in ("nothing", "reuse")),
    "both-nothing",
)


def tuning_arms() -> list[Arm]:
    """Every kind of run at every rate and weight decay."""
    return [
        replace(arm, name=f"TUNE-{kind}-{rate:g}-{decay:g}")
        for rate in RATES
        for decay in DECAYS
        for kind, arm in kinds(dict.fromkeys(KINDS, Chosen(rate, decay)), TUNED_AT).items()
    ]


def chosen_by(folder: Path) -> dict[str, Chosen]:
    """The best rate and weight decay of each kind, by the mean over seeds of the last held-out accuracy."""
    results = read_all(folder) if any(folder.glob("*.json")) else {}
    missing = [arm.name for arm in tuning_arms() if arm.name not in results]
    if missing:
        raise ResultsError(
            f"{folder} lacks {missing[0]} and {len(missing) - 1} others: run python -m experiments --set tuning first"
        )

    def score(kind: str, rate: float, decay: float) -> float:
        curves = results[f"TUNE-{kind}-{rate:g}-{decay:g}"]["curves"].values()
        return mean(stages[-1]["accuracy"][-1] for stages in curves)

    pairs = [(rate, decay) for rate in RATES for decay in DECAYS]
    return {kind: Chosen(*max(pairs, key=lambda pair: score(kind, *pair))) for kind in KINDS}


SWEEP: dict[str, tuple[float | str, ...]] = {
    "rate": (0.2, 0.5, 1.0, 2.0),  # factors on what was chosen, from the growth on
    "decay": (0.2, 1.0, 5.0),
    "scale": (0.1, 0.3, 1.0, 2.0),
    "state": ("kept", "fresh"),
    "new_rate": (0.5, 1.0, 2.0, 4.0),
}


def sweep_arms(chosen: Mapping[str, Chosen]) -> list[Arm]:
    """One thing at a time changed at the growth, in both accounts."""
    arms = []
    for what in SMALL:
        for account in ("nothing", "reuse"):
            picked = chosen[f"{what}-{account}"]
            plain = (
                from_nothing("", what, "r2r", 2 * SWEPT_AT, picked)
                if account == "nothing"
                else reuse("", what, "r2r", SWEPT_AT, picked, chosen[f"small-{what}"])
            )
            for setting, values in SWEEP.items():
                for value in values if (what, setting) != ("deepen", "scale") else ():  # a branch that is closed has none
                    last = changed(plain.stages[-1], setting, value)
                    name = f"SWEEP-{what}-{account}-{setting}-{value}"
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


def protocol_arms(chosen: Mapping[str, Chosen]) -> list[Arm]:
    """All budgets, methods and shares, and what they are compared with."""
    arms = [scratch(f"EQ-scratch@{budget}", BIG, budget, chosen["scratch"]) for budget in sorted({*BUDGETS, *REUSED})]
    for what, methods in METHODS.items():
        picked = chosen[f"{what}-nothing"]
        for budget in BUDGETS:
            arms.append(scratch(f"EQ-small-{what}@{budget}", SMALL[what], budget, chosen[f"small-{what}"]))
            arms += [from_nothing(f"EQ-{what}-{method}@{budget}", what, method, budget, picked) for method in methods]
            for share in OTHER_SHARES:
                arms.append(from_nothing(f"EQ-{what}-r2r-{share:g}@{budget}", what, "r2r", budget, picked, share))
        again, teacher = chosen[f"{what}-reuse"], chosen[f"small-{what}"]
        for budget in REUSED:
            arms += [reuse(f"RE-{what}-{method}@{budget}", what, method, budget, again, teacher) for method in methods]
    for budget in BUDGETS:
        arms += [twice(f"EQ-both-{order}@{budget}", order, budget, chosen["both-nothing"]) for order in FIRST]
    return arms
