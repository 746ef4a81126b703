"""The numbers of the report: final accuracies, differences between arms, what a growth does at once, and the compute it saves.

No drawing and no words here. Accuracies are in per cent, differences in points. An arm that is not among the results is left
out of every table, so that a few arms make a report as well as all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.reading.curves import ACCOUNTS, Estimate, Results, bootstrap, by_account, reached, roads
from experiments.reading.diversity import Filters, measure_all

TARGETS = (60.0, 65.0, 68.0, 70.0)
LAST = 10  # epochs of the mean over the end of a curve


@dataclass(frozen=True)
class Group:
    """Arms of one figure. `scratch` is the grown network trained from its beginning, `padding` growth by random values."""

    key: str
    title: str
    arms: tuple[str, ...]
    scratch: str | None = None
    padding: str | None = None
    teachers: tuple[str, ...] = ()
    costs: bool = False  # whether it is asked what an accuracy costs

    def present(self, results: Results) -> tuple[str, ...]:
        return tuple(name for name in self.arms if name in results)


GROUPS = (
    Group(
        "nct-widen",
        "Convergence, widened",
        ("NCT-R2WiderR", "NCT-NetMorph", "NCT-Net2WiderNet", "NCT-RandPadWiden", "NCT-RandomWide"),
        "NCT-RandomWide",
        "NCT-RandPadWiden",
        ("NCT-WidenTeacher", "NCT-WidenTeacher(NoResidual)", "NCT-RandomWide(NoResidual)"),
        costs=True,
    ),
    Group(
        "nct-deepen",
        "Convergence, deepened",
        ("NCT-R2DeeperR", "NCT-R2DeeperR(paper)", "NCT-Net2DeeperNet", "NCT-RandPadDeeper", "NCT-RandomDeep"),
        "NCT-RandomDeep",
        "NCT-RandPadDeeper",
        ("NCT-DeepenTeacher", "NCT-DeepenTeacher(NoResidual)"),
        costs=True,
    ),
    Group(
        "ftt-widen",
        "Faster training, widened",
        ("FTT-R2WiderR", "FTT-NetMorph", "FTT-Net2WiderNet", "FTT-RandPadWiden", "FTT-RandomWide"),
        "FTT-RandomWide",
        "FTT-RandPadWiden",
        costs=True,
    ),
    Group(
        "ftt-deepen",
        "Faster training, deepened",
        ("FTT-R2DeeperR", "FTT-R2DeeperR(paper)", "FTT-Net2DeeperNet", "FTT-RandPadDeeper", "FTT-RandomDeep"),
        "FTT-RandomDeep",
        "FTT-RandPadDeeper",
        costs=True,
    ),
    Group(
        "apb-widen",
        "Appendix B, widened",
        ("APB-R2WiderR", "APB-R2WiderR@3000", "APB-R2WiderR@1500", "APB-Scratch"),
        "APB-Scratch",
        costs=True,
    ),
    Group(
        "apb-deepen",
        "Appendix B, deepened",
        ("APB-R2DeeperR", "APB-R2DeeperR@3000", "APB-R2DeeperR@1500", "APB-Scratch"),
        "APB-Scratch",
        costs=True,
    ),
    Group("of", "An overfitted teacher", ("OF-Student", "OF-Teacher", "OF-Rand"), "OF-Rand"),
    Group("bi", "Bad initialisation", ("BI-Std", "BI-He")),
    Group("viz", "Filters", ("VIZ-R2R", "VIZ-Net2Net", "VIZ-NetMorph")),
)

# Net2Net's networks have no residual connections; these are their own kind, trained from scratch.
PLAIN_SCRATCH = {"NCT-Net2WiderNet": "NCT-RandomWide(NoResidual)", "NCT-Net2DeeperNet": "NCT-WidenTeacher(NoResidual)"}


def last(results: Results, name: str, epochs: int = 1) -> list[float]:
    """The accuracy of each seed at the end, as the mean of so many last epochs of its last stage."""
    content = results[name]
    ends = [content["curves"][str(seed)][-1]["accuracy"][1:][-epochs:] for seed in content["seeds"]]
    return [100 * float(np.mean(end)) for end in ends]


def spread(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Final:
    arm: str
    n: int
    mean: float
    sd: float
    late: float  # mean of the last ten epochs
    late_sd: float
    paper: float | None
    difference: Estimate | None  # ours less the paper's


def final_table(results: Results) -> list[Final]:
    """Every arm's accuracy at its end, beside the paper's where there is one."""
    rows = []
    for name in in_order(results):
        end, late, paper = last(results, name), last(results, name, LAST), results[name]["arm"]["paper"]
        difference = None if paper is None else bootstrap([value - paper for value in end])
        rows.append(
            Final(name, len(end), float(np.mean(end)), spread(end), float(np.mean(late)), spread(late), paper, difference)
        )
    return rows


def in_order(results: Results) -> list[str]:
    """Names in the groups' order, then the rest."""
    known = [name for group in GROUPS for name in (*group.arms, *group.teachers)]
    return [name for name in dict.fromkeys(known) if name in results] + sorted(set(results) - set(known))


@dataclass(frozen=True)
class Pair:
    arm: str
    against: str
    role: str  # of the other one: "scratch", "scratch, no residuals", "padding", "teacher"
    end: Estimate
    late: Estimate


def paired(results: Results, arm: str, against: str, role: str) -> Pair | None:
    """How much better an arm ends than another, seed by seed over the seeds that both have."""
    if arm == against or arm not in results or against not in results:
        return None
    shared = [seed for seed in results[arm]["seeds"] if seed in results[against]["seeds"]]
    if not shared:
        return None
    estimates = []
    for epochs in (1, LAST):
        one, other = last(results, arm, epochs), last(results, against, epochs)
        of = dict(zip(results[arm]["seeds"], one, strict=True)), dict(zip(results[against]["seeds"], other, strict=True))
        estimates.append(bootstrap([of[0][seed] - of[1][seed] for seed in shared]))
    return Pair(arm, against, role, *estimates)


def paired_table(results: Results) -> list[Pair]:
    """Grown arms against scratch, against random padding, and the overfitted student against its teacher."""
    pairs = []
    for group in GROUPS:
        for name in group.present(results):
            if name == group.scratch:
                continue
            pairs.append(paired(results, name, group.scratch or "", "scratch"))
            pairs.append(paired(results, name, PLAIN_SCRATCH.get(name, ""), "scratch, no residuals"))
            pairs.append(paired(results, name, group.padding or "", "padding"))
    pairs.append(paired(results, "OF-Student", "OF-Teacher", "teacher"))
    pairs.append(paired(results, "BI-Std", "BI-He", "He"))
    return [pair for pair in pairs if pair is not None and pair.arm != "OF-Teacher"]


@dataclass(frozen=True)
class AtGrowth:
    arm: str
    n: int
    before: float | None  # accuracy; None where the teacher's results are not there
    after: float
    drop: Estimate | None  # after less before
    one_epoch: float
    first_loss: float  # of the first step, and the highest of the ten behind it
    worst_loss: float
    error: float  # the largest of the outputs' over the seeds, as the growth measured it
    preserving: bool
    parameters: tuple[int, int]


def growth_table(results: Results) -> list[AtGrowth]:
    """What each growth does at once."""
    rows = []
    for name in in_order(results):
        ways = roads(results, name)
        if ways[0].grown is None:
            continue
        content = results[name]
        place = ways[0].cuts.index(ways[0].grown) - len(ways[0].cuts)
        pieces = [content["curves"][str(seed)][place] for seed in content["seeds"]]
        whole = all(one.whole for one in ways)
        after = [float(one.accuracy[one.grown]) for one in ways if one.grown is not None]
        before = [float(one.accuracy[one.grown - 1]) for one in ways if one.grown] if whole else []
        rows.append(
            AtGrowth(
                arm=name,
                n=len(ways),
                before=float(np.mean(before)) if before else None,
                after=float(np.mean(after)),
                drop=bootstrap([a - b for a, b in zip(after, before, strict=True)]) if before else None,
                one_epoch=100 * float(np.mean([piece["accuracy"][1] for piece in pieces])),
                first_loss=float(np.mean([piece["steps"][0] for piece in pieces])),
                worst_loss=float(np.mean([max(piece["steps"][1:11], default=math.nan) for piece in pieces])),
                error=max(piece["growth"]["error"] for piece in pieces),
                preserving=all(piece["growth"]["preserving"] for piece in pieces),
                parameters=tuple(pieces[0]["growth"]["parameters"]),
            )
        )
    return rows


@dataclass(frozen=True)
class Cost:
    """What an accuracy costs an arm. `saving` is against another one, over the `saving.n` seeds in which both reach it."""

    arm: str
    against: str
    target: float
    what: str  # "70 %", or whose accuracy it is
    account: str
    axis: str
    reached: int  # of n seeds
    early: int  # of these, before the growth: the small network did it alone
    n: int
    median: float  # over all seeds; infinity where less than half reach it
    saving: Estimate | None


def saved(arm: Any, scratch: Any, axis: int = -1) -> Any:
    """The share of scratch's cost that was not needed, by the means over seeds."""
    return 1 - arm.mean(axis=axis) / scratch.mean(axis=axis)


def cost(results: Results, name: str, against: str, target: float, what: str, account: str, axis: str) -> Cost | None:
    """None where the account can't be told."""
    ways = [way for one in roads(results, name) if (way := by_account(one, account))]
    seeds = results[name]["seeds"]
    if len(ways) < len(seeds):
        return None
    costs = dict(zip(seeds, (reached(way, axis, target) for way in ways), strict=True))
    saving = None
    if name != against:
        whole = zip(results[against]["seeds"], roads(results, against), strict=True)
        base = {seed: reached(one, axis, target) for seed, one in whole}
        both = [seed for seed in costs if math.isfinite(costs[seed]) and math.isfinite(base.get(seed, math.inf))]
        if len(both) > 1:
            saving = bootstrap([costs[seed] for seed in both], [base[seed] for seed in both], statistic=saved)
    hit = sum(math.isfinite(value) for value in costs.values())
    early = sum(bool(way.grown) and bool((way.accuracy[: way.grown] >= target).any()) for way in ways)
    median = float(np.median(list(costs.values())))
    return Cost(name, against, target, what, account, axis, hit, early, len(costs), median, saving)


def late_mean(results: Results, name: str) -> float:
    return float(np.mean(last(results, name, LAST)))


def cost_table(results: Results) -> list[Cost]:
    """Compute to reach accuracies, in FLOPs and seconds, in both accounts, for the groups that have a scratch of their own.

    The last target of a group is where its network from scratch ends (mean of the last ten epochs). In the convergence tests
    that one keeps a high rate to its end, which is no fair measure: there, the scratch of the faster-training tests, whose rate
    drops as the grown arms' does, is set beside them too.
    """
    rows = []
    for group in GROUPS:
        if group.scratch not in results or not group.costs:
            continue
        fair = {"nct-widen": "FTT-RandomWide", "nct-deepen": "FTT-RandomDeep"}.get(group.key)
        goals = [(target, f"{target:g} %", group.scratch) for target in TARGETS]
        goals.append((late_mean(results, group.scratch), "scratch's final", group.scratch))
        if fair in results:
            goals.append((late_mean(results, fair), "scratch's final, rate dropped", fair))
        for target, what, against in goals:
            for name in (*group.present(results), *([fair] if against == fair else [])):
                for account in ACCOUNTS:
                    rows += [cost(results, name, against, target, what, account, axis) for axis in ("flops", "seconds")]
    return [row for row in rows if row is not None]


@dataclass(frozen=True)
class Work:
    """How much was trained for all results together; stages that arms share are counted once."""

    arms: int
    networks: int
    growths: int
    epochs: float
    flops: float
    seconds: float


def work(results: Results) -> Work:
    seen: dict[str, tuple[float, float, float, bool]] = {}
    for content in results.values():
        arm = content["arm"]
        for seed in content["seeds"]:
            for place, curve in enumerate(content["curves"][str(seed)], start=arm["own"] + 1):
                key = repr((arm["net"], arm["stages"][:place], arm["optimizer"], arm["flips"], seed))
                growth = curve["growth"].get("seconds", 0.0)
                seen[key] = (curve["epoch"][-1], curve["flops"][-1], curve["seconds"][-1] + growth, bool(curve["growth"]))
    networks = sum(len(content["seeds"]) for content in results.values())
    epochs, flops, seconds, growths = (sum(column) for column in zip(*seen.values(), strict=True))
    return Work(len(results), networks, int(growths), epochs, flops, seconds)


@dataclass(frozen=True)
class Numbers:
    """All tables, and the folder's filters where there are any."""

    results: Results
    filters: Filters
    final: list[Final]
    pairs: list[Pair]
    growths: list[AtGrowth]
    costs: list[Cost]
    diversity: list[Any]
    work: Work

    def end(self, arm: str) -> Final | None:
        return next((row for row in self.final if row.arm == arm), None)

    def pair(self, arm: str, against: str) -> Pair | None:
        return next((row for row in self.pairs if (row.arm, row.against) == (arm, against)), None)

    def growth(self, arm: str) -> AtGrowth | None:
        return next((row for row in self.growths if row.arm == arm), None)

    def cost(self, arm: str, what: str, account: str, axis: str = "flops") -> Cost | None:
        wanted = (arm, what, account, axis)
        return next((row for row in self.costs if (row.arm, row.what, row.account, row.axis) == wanted), None)


def numbers(results: Results, filters: Filters) -> Numbers:
    return Numbers(
        results,
        filters,
        final_table(results),
        paired_table(results),
        growth_table(results),
        cost_table(results),
        measure_all(filters),
        work(results),
    )
