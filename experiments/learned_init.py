"""Do learned values and scores help? `python -m experiments.learned_init` runs the comparison on a CPU and writes its results.

Networks are widened in three small steps during their training. All arms of a task get the same FLOPs, and the passes by which
GradMax, North and scores learn are part of them. With digits, the rate of each arm is the best of three on other seeds; a GPT
takes longer to train, and all its arms have one rate.

    how     which values new units get: drawn, GradMax or North, with R2R pairs and with NetMorph; all volumes grow
    where   which of three volumes grows at each step: the best by `outgrow.scores`, the worst, or each in turn

One task is scikit-learn's digits with a small MLP (ReLU), the other Shakespeare's plays with a small GPT, whose MLPs grow.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from experiments.lm.gpt import Size, build
from experiments.lm.results import facts
from experiments.lm.text import batch as text_batch
from experiments.lm.text import shakespeare
from experiments.reading.curves import student
from experiments.setting.data import digits

RESULTS = Path(__file__).parent / "results" / "learned-init"
MOMENTS = (0.15, 0.3, 0.45)  # shares of the FLOPs at which networks grow
DECAY = 0.6  # from this share on, the rate falls linearly to zero
LEARN_FROM = 4  # batches

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """Data and networks: `small` grows to the size of `large`; `steps` of the small network would use all FLOPs."""

    name: str
    small: Callable[[int], nn.Module]
    large: Callable[[int], nn.Module]
    batch: Callable[[int], Batch]
    held_out: Sequence[Batch]
    volumes: tuple[str, ...]
    steps: int
    rates: tuple[float, ...]
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    decay: float = 0.0
    tuning: tuple[int, ...] = ()  # seeds on which rates are chosen


@dataclass(frozen=True)
class Arm:
    """The method and the init of new units; "small" and "large" do not grow. where: "all", "best", "worst" or "in turn"."""

    name: str
    method: str
    init: str = "drawn"
    where: str = "all"
    against: str = ""  # the arm that it is compared with


HOW = (
    Arm("small", "small"),
    Arm("large", "large"),
    Arm("r2r", "r2r"),
    Arm("r2r + gradmax", "r2r", "gradmax", against="r2r"),
    Arm("r2r + gradmax, rows drawn", "r2r", "gradmax, rows drawn", against="r2r"),
    Arm("r2r + north", "r2r", "north", against="r2r"),
    Arm("netmorph", "netmorph"),
    Arm("netmorph + gradmax", "netmorph", "gradmax", against="netmorph"),
    Arm("netmorph + north", "netmorph", "north", against="netmorph"),
)
DIGITS_ONLY = ("r2r + gradmax, rows drawn", "netmorph + north")  # fewer arms where a run takes longer
CONTROL = Arm("r2r, cost of gradmax", "r2r", "drawn, cost of gradmax", against="r2r")  # drawn, with GradMax's FLOPs
ZERO_WRITERS = (
    Arm("zero writers", "zero writers"),
    Arm("zero writers + gradmax", "zero writers", "gradmax", against="zero writers"),
)
WHERE = (
    Arm("in turn", "r2r", where="in turn"),
    Arm("best score", "r2r", where="best", against="in turn"),
    Arm("worst score", "r2r", where="worst", against="in turn"),
)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def mlp(sizes: Sequence[int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def of_digits(name: str, sizes: Sequence[int], large: Sequence[int], arms: tuple[Arm, ...]) -> Task:
    data = digits()
    x, test = ((images.flatten(1).float() / 255 - data.mean) / data.deviation for images in (data.images, data.test_images))

    def batch(seed: int) -> Batch:
        chosen = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(seed))
        return x[chosen], data.labels[chosen]

    return Task(
        name,
        lambda seed: mlp(sizes, seed),
        lambda seed: mlp(large, seed),
        batch,
        [(test, data.test_labels)],
        tuple(str(2 * number) for number in range(len(sizes) - 2)),
        2400,
        (1e-3, 3e-3, 1e-2),
        arms,
        tuple(range(10)),
        tuning=(100, 101),
    )


def of_plays() -> Task:
    text = shakespeare()
    return Task(
        "plays",
        lambda seed: build(Size(2, 48, 6, 32, 8), 64, seed),
        lambda seed: build(Size(2, 48, 6, 128, 8), 64, seed),
        lambda seed: text_batch(text.train, 16, 64, seed),
        [text_batch(text.held_out, 64, 64, seed) for seed in range(4)],
        ("blocks.0.mlp.up", "blocks.1.mlp.up"),
        300,
        (3e-3,),
        (*(arm for arm in HOW if arm.name not in DIGITS_ONLY), *ZERO_WRITERS, CONTROL),
        tuple(range(5)),
        0.1,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: of_digits("digits", (64, 8, 8, 10), (64, 32, 32, 10), HOW),
    "digits-where": lambda: of_digits("digits-where", (64, 8, 8, 8, 10), (64, 24, 24, 24, 10), WHERE),
    "plays": of_plays,
}


def step_flops(model: nn.Module, batch: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch).backward()
    model.zero_grad()
    return int(counter.get_total_flops())


@dataclass
class Run:
    """One network in training."""

    task: Task
    arm: Arm
    rate: float
    seed: int
    flops: float = 0.0
    steps: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"growths": []})

    def train(self, budget: float) -> dict[str, Any]:
        task, started = self.task, time.perf_counter()
        model = (task.large if self.arm.method == "large" else task.small)(self.seed)
        optimizer = torch.optim.AdamW(model.parameters(), self.rate, weight_decay=task.decay)
        grows = self.arm.method not in ("small", "large")
        moments = list(MOMENTS) if grows else []
        cost = step_flops(model, task.batch(0))
        losses: list[float] = []
        while self.flops < budget:
            if moments and self.flops >= moments[0] * budget:
                self.grow(model, optimizer, len(MOMENTS) - len(moments), cost)
                moments.pop(0)
                cost = step_flops(model, task.batch(0))
                continue
            share = self.flops / budget
            for group in optimizer.param_groups:
                group["lr"] = self.rate * min(1.0, (1 - share) / (1 - DECAY))
            optimizer.zero_grad()
            loss = loss_of(model, task.batch(self.seed * 100_000 + self.steps))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            self.flops += cost
            self.steps += 1
        with torch.no_grad():
            held_out = sum(float(loss_of(model, one)) for one in task.held_out) / len(task.held_out)
        self.record |= {
            "held_out": held_out,
            "train": sum(losses[-50:]) / len(losses[-50:]),
            "steps": self.steps,
            "flops": self.flops,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "seconds": round(time.perf_counter() - started, 2),
        }
        return self.record

    def grow(self, model: nn.Module, optimizer: torch.optim.Optimizer, number: int, cost: int) -> None:
        task, arm = self.task, self.arm
        batches = [task.batch(50_000_000 + self.seed * 1_000 + number * 100 + index) for index in range(LEARN_FROM)]
        before = self.flops
        sizes = self.sizes(model, batches, number)
        if arm.where in ("best", "worst"):
            self.flops += LEARN_FROM * cost * 4 / 3  # products of inputs and gradients cost no more than another forward pass
        init: Any = "std"
        if arm.init == "north":
            init = outgrow.North()
        elif arm.init.startswith("gradmax"):
            init = outgrow.GradMax(batches, loss_of, "drawn" if arm.init.endswith("drawn") else "matching")
        if "gradmax" in arm.init:
            self.flops += LEARN_FROM * cost * 4 / 3
        methods = {
            "r2r": lambda: outgrow.R2R(init=init),
            "netmorph": lambda: outgrow.NetMorph(init=init),
            "zero writers": lambda: outgrow.NetMorph(init=init, zero="writers"),
        }
        widenings = [outgrow.Widen(name, to=size, method=methods[arm.method]()) for name, size in sizes.items()]
        growth = outgrow.grow(model, batches[0][0], *widenings, optimizer=optimizer, seed=self.seed)
        assert growth.preserving
        self.record["growths"].append(
            {"step": self.steps, "sizes": sizes, "error": growth.max_error, "cost": self.flops - before}
        )

    def sizes(self, model: nn.Module, batches: Sequence[Batch], number: int) -> dict[str, int]:
        """The sizes to which volumes grow now."""
        task, arm = self.task, self.arm
        now = {name: int(model.get_submodule(name).weight.shape[0]) for name in task.volumes}  # type: ignore[union-attr, index]
        goal = {name: int(task.large(0).get_submodule(name).weight.shape[0]) for name in task.volumes}  # type: ignore[union-attr, index]
        if arm.where == "all":
            start = {name: int(task.small(0).get_submodule(name).weight.shape[0]) for name in task.volumes}  # type: ignore[union-attr, index]
            part = (number + 1) / len(MOMENTS)
            return {name: start[name] + 2 * round((goal[name] - start[name]) * part / 2) for name in task.volumes}
        scores = outgrow.scores(model, batches, loss_of)
        per_unit = {score.volume: score.flops / score.new for score in scores.volumes}
        order = [score.volume for score in scores.volumes]
        name = {"best": order[0], "worst": order[-1], "in turn": task.volumes[number % len(task.volumes)]}[arm.where]
        added = 1000 * 2 * len(batches[0][0])  # multiplications and additions: about 1,000 weights
        return {name: now[name] + 2 * max(round(added / per_unit[name] / 2), 1)}


def run_task(task: Task, log: Callable[[str], None]) -> dict[str, Any]:
    """Tune and train all arms."""
    budget = float(task.steps * step_flops(task.small(0), task.batch(0)))
    results: dict[str, Any] = {"budget": budget, "arms": {}}
    for arm in task.arms:
        tuned = {rate: [Run(task, arm, rate, seed).train(budget)["held_out"] for seed in task.tuning] for rate in task.rates}
        rate = min(tuned, key=lambda one: sum(tuned[one]) if all(map(math.isfinite, tuned[one])) else math.inf)
        seeds = {str(seed): Run(task, arm, rate, seed).train(budget) for seed in task.seeds}
        results["arms"][arm.name] = {**asdict(arm), "rate": rate, "tuned": {str(key): value for key, value in tuned.items()}}
        results["arms"][arm.name]["seeds"] = seeds
        log(f"{task.name}, {arm.name}: rate {rate}, {summary(results, arm.name, 'held_out')}")
    return results


def summary(results: dict[str, Any], name: str, what: str) -> str:
    """The mean of an arm with its interval, and the difference to the arm that it is compared with."""
    arm = results["arms"][name]
    own = student([one[what] for one in arm["seeds"].values()])
    text = f"{own.value:.4f} [{own.low:.4f}, {own.high:.4f}]"
    if arm["against"]:
        other = results["arms"][arm["against"]]["seeds"]
        gap = student([one[what] - other[seed][what] for seed, one in arm["seeds"].items()])
        text += f", {gap.value:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}] against {arm['against']}"
    return text


def table(results: dict[str, Any]) -> str:
    """The results of a task as a table in Markdown."""

    def cell(values: Sequence[float], sign: str = "") -> str:
        one = student(values)
        return f"{one.value:{sign}.3f} [{one.low:{sign}.3f}, {one.high:{sign}.3f}]".replace("-", "−")

    lines = ["| arm | rate | loss on held-out data | difference | to |", "| --- | --- | --- | --- | --- |"]
    for name, arm in results["arms"].items():
        gap, against = "", arm["against"]
        if against:
            other = results["arms"][against]["seeds"]
            gap = cell([one["held_out"] - other[seed]["held_out"] for seed, one in arm["seeds"].items()], "+")
        own = cell([one["held_out"] for one in arm["seeds"].values()])
        lines.append(" ".join(f"| {text}" if text else "|" for text in (name, f"{arm['rate']:g}", own, gap, against)) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help=f"of {', '.join(TASKS)}; all of them by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in given.tasks or TASKS:
        task = TASKS[name]()
        started = time.perf_counter()
        results = run_task(task, print)
        setting = {"moments": MOMENTS, "decay from": DECAY, "batches": LEARN_FROM, "steps": task.steps, "rates": task.rates}
        setting |= {"tuning seeds": task.tuning, "seeds": task.seeds, "weight decay": task.decay}
        made_by = {"command": f"python -m experiments.learned_init {name}", "seconds": round(time.perf_counter() - started)}
        content = {"task": name, "setting": setting, **facts("cpu"), **made_by, **results}
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
