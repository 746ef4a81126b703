"""The tables of the report: final accuracies, differences between arms, what a growth does at once, and the compute it saves.

No drawing and no words here. Accuracies are in per cent, differences in points. An arm that is not among the results is left
out of every table, so that a few arms make a report as well as all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.reading.curves import ACCOUNTS, Estimate, Results, bootstrap, by_account, reached, roads, student, teacher_of
from experiments.reading.diversity import Filters, measure_all
from experiments.reading.groups import GROUPS, PLAIN_SCRATCH

TARGETS = (60.0, 65.0, 68.0, 70.0)
LAST = 10  # epochs of the mean over the end of a curve


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
    difference: Estimate | None  # ours less the paper's, with the errors of both
    validation: float | None = None  # mean of the last epoch on the validation set, where one was held out


def final_table(results: Results) -> list[Final]:
    """Every arm's accuracy at its end, beside the paper's where there is one."""
    rows = []
    for name in in_order(results):
        end, late, paper = last(results, name), last(results, name, LAST), results[name]["arm"]["paper"]
        difference = None if paper is None else beside_paper(end, paper)
        held = [stages[-1].get("validation_accuracy") or [] for stages in results[name]["curves"].values()]
        validation = 100 * float(np.mean([one[-1] for one in held])) if all(held) else None
        means = float(np.mean(end)), spread(end), float(np.mean(late)), spread(late)
        rows.append(Final(name, len(end), *means, paper, difference, validation))
    return rows


PAPER_IMAGES, TEST_IMAGES = 1_000, 10_000


def image_error(accuracy: float, images: int) -> float:
    """The standard error of an accuracy (both in per cent) that so many images give."""
    share = accuracy / 100
    return 100 * math.sqrt(share * (1 - share) / images)


def beside_paper(values: list[float], paper: float) -> Estimate:
    """Our mean less the paper's accuracy, with a 95 % interval.

    Three errors are in it: the paper's, one run on 1,000 images; ours over seeds (Student's t); that of our 10,000 images.
    """
    ours = student(values)
    images = 1.96 * math.hypot(image_error(paper, PAPER_IMAGES), image_error(ours.value, TEST_IMAGES))
    half = math.hypot(ours.high - ours.value, images)
    value = ours.value - paper
    return Estimate(value, value - half, value + half, max(2, ours.n))


def in_order(results: Results) -> list[str]:
    """Names in the groups' order, then the rest."""
    known = [name for group in GROUPS for name in (*group.arms, *group.more, *group.teachers)]
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
        estimates.append(student([of[0][seed] - of[1][seed] for seed in shared]))
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
    soon: float | None = None  # training loss over the next twenty steps, relative to the thirty before, where those are kept


def growth_table(results: Results) -> list[AtGrowth]:
    """What each growth does at once."""
    rows = []
    for name in in_order(results):
        ways = roads(results, name)
        content = results[name]
        if ways[0].grown is None or not any(stage["grow"] for stage in content["arm"]["stages"]):
            continue
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
                soon=soon(results, name, place),
            )
        )
    return rows


def soon(results: Results, name: str, place: int, steps: int = 20) -> float | None:
    """Training loss over the steps after a growth, relative to the last ones before it; None where those are not kept."""
    content, ratios = results[name], []
    teacher = teacher_of(results, name) if content["arm"]["own"] else None
    for seed, stages in content["curves"].items():
        before = results[teacher]["curves"].get(seed, []) if teacher else []
        whole = [*before, *stages]
        last_steps = whole[place - 1].get("last") if len(whole) >= 1 - place else None
        if last_steps and whole[place].get("steps"):
            ratios.append(float(np.mean(whole[place]["steps"][:steps]) / np.mean(last_steps)))
    return float(np.mean(ratios)) if ratios else None


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
    group: str = ""  # the key of the group whose question it is


def saved(arm: Any, scratch: Any, axis: int = -1) -> Any:
    """The share of scratch's cost that was not needed, by the means over seeds."""
    return 1 - arm.mean(axis=axis) / scratch.mean(axis=axis)


def cost(results: Results, name: str, against: str, target: float, what: str, account: str, axis: str) -> Cost | None:
    """None where the results of the account are not there."""
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
    rows: list[Cost] = []
    for group in GROUPS:
        if group.scratch not in results or not group.costs:
            continue
        fair = {"nct-widen": "FTT-RandomWide", "nct-deepen": "FTT-RandomDeep"}.get(group.key)
        goals = [(target, f"{target:g} %", group.scratch) for target in TARGETS]
        goals.append((late_mean(results, group.scratch), "scratch's final", group.scratch))
        if fair in results:
            goals.append((late_mean(results, fair), "scratch's final, rate dropped", fair))
        for target, what, against in goals:
            for name in (*group.present(results), *([fair] if fair in results else [])):
                for account in ACCOUNTS:
                    found = (cost(results, name, against, target, what, account, axis) for axis in ("flops", "seconds"))
                    rows += [replace(row, group=group.key) for row in found if row is not None]
    return rows


@dataclass(frozen=True)
class Work:
    """How much was trained for all results together; stages that arms share are counted once."""

    arms: int
    networks: int
    growths: int
    epochs: float
    flops: float
    seconds: dict[str, float]  # by device, that with most of the networks first


def work(results: Results) -> Work:
    seen: dict[str, tuple[float, float, bool]] = {}
    spent: dict[str, tuple[str, float]] = {}
    for content in results.values():
        arm = content["arm"]
        for seed in content["seeds"]:
            for place, curve in enumerate(content["curves"][str(seed)], start=arm["own"] + 1):
                key = repr((arm["net"], arm["stages"][:place], arm["optimizer"], arm["flips"], seed))
                growth = curve["growth"].get("seconds", 0.0)
                seen[key] = (curve["epoch"][-1], curve["flops"][-1], bool(curve["growth"]))
                spent[key] = (content["device"], curve["seconds"][-1] + growth)
    networks = sum(len(content["seeds"]) for content in results.values())
    epochs, flops, growths = (sum(column) for column in zip(*seen.values(), strict=True))
    devices = Counter(device for device, _ in spent.values())
    seconds = {one: sum(took for device, took in spent.values() if device == one) for one, _ in devices.most_common()}
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

    def cost(self, arm: str, what: str, account: str, axis: str = "flops", group: str = "") -> Cost | None:
        """`group`: only rows of that group."""
        wanted = (arm, what, account, axis)
        rows = (row for row in self.costs if row.group == (group or row.group))
        return next((row for row in rows if (row.arm, row.what, row.account, row.axis) == wanted), None)


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
