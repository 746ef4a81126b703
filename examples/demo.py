"""Grow a network in the middle of its training, by every method, and look at what that does to the loss.

A small residual network (batch norm, a plain `nn.Module`) learns scikit-learn's digits with AdamW. Half-way it is widened by
each method in turn, optimizer and all, and goes on with the same batches. Three baselines: the network that is not grown, and
the big one trained from scratch, for as many steps and for as many FLOPs. Everything is repeated for several seeds.

    python examples/demo.py            writes demo/report.html and demo/results.json
    python examples/demo.py --help     other seeds, widths, folders

Needs matplotlib and scikit-learn; uses rich for the progress bar where it is installed.
"""

from __future__ import annotations

import argparse
import base64
import copy
import hashlib
import html
import importlib.metadata
import io
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outgrow

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Config:
    """All that the numbers depend on."""

    width: int = 6
    factor: int = 2
    blocks: int = 2
    epochs: int = 16  # the network is grown after half of them
    batch: int = 64
    rate: float = 3e-3
    weight_decay: float = 0.01
    decay: float = 0.3  # the last part of the steps, over which the rate falls to zero
    after: int = 20  # steps after the growth that are compared with the twin that is not grown
    seeds: tuple[int, ...] = (0, 1, 2, 3)


class Block(nn.Module):
    """Two convolutions and a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(inner)))


class ResidualNet(nn.Module):
    """A stem, some blocks on one stream, and a linear head. Nothing in it knows of outgrow."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        return self.head(self.blocks(x).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Arm:
    """One way to train, and how it is drawn."""

    name: str
    note: str
    method: str | outgrow.Net2Net = ""
    colour: str = "#000000"
    dashes: str | tuple[int, tuple[float, ...]] = "-"
    marker: str = "o"

    @property
    def title(self) -> str:
        return self.name + (" (does not preserve)" if self.method == "random" else "")


# Colours of Okabe and Ito, which all kinds of colour vision tell apart; line styles and markers differ as well.
TWIN = Arm("not grown", "the small network to the end", colour="#999999")
GROWN = (
    Arm("r2r", "pairs of new units that cancel", "r2r", "#0072B2", "-", "^"),
    Arm("net2net", "copies that share, in random parts", outgrow.Net2Net(split="random"), "#009E73", (0, (6, 2)), "v"),
    Arm("netmorph", "new units that nobody reads yet", "netmorph", "#CC79A7", (0, (3, 1.5)), "D"),
    Arm("random", "all new values drawn: does NOT preserve the function", "random", "#D55E00", (0, (5, 1, 1, 1)), "X"),
)
SCRATCH = Arm("scratch", "the big network from the first step on, as many steps", dashes=(0, (1, 1.5)), marker="s")
EQUAL = Arm("scratch, same FLOPs", "the big network from the first step on, as many FLOPs as a grown one", marker="P")
ARMS = (TWIN, *GROWN, SCRATCH, EQUAL)


@dataclass
class Run:
    """What one arm did with one seed. `losses` has an entry a step; `tested` holds (step, test accuracy)."""

    arm: str
    seed: int
    losses: list[float] = field(default_factory=list)
    tested: list[tuple[int, float]] = field(default_factory=list)
    loss_before: float | None = None  # over all training images, eval mode
    loss_after: float | None = None
    error: float | None = None
    tolerance: float | None = None
    growth_seconds: float | None = None
    parameters: int = 0
    flops: int = 0  # forward, one image
    training_flops: int = 0  # forward and backward (taken as 3 × forward), all steps


@dataclass(frozen=True)
class Data:
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_data() -> Data:
    """1,797 images of 8 × 8; every fourth one, after a fixed shuffle, is kept for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[::4], order[torch.arange(len(order)) % 4 != 0]
    return Data((images[train], labels[train]), (images[test], labels[test]))


@dataclass(frozen=True)
class Schedule:
    """The batches that all arms of a seed see, in order, and the learning rate of every step."""

    batches: tuple[Tensor, ...]
    rates: tuple[float, ...]
    epoch: int  # steps

    @property
    def steps(self) -> int:
        return len(self.batches)

    @staticmethod
    def of(config: Config, images: int, seed: int) -> Schedule:
        generator = torch.Generator().manual_seed(1000 + seed)
        epoch = images // config.batch
        batches: list[Tensor] = []
        for _ in range(config.epochs):
            batches += torch.randperm(images, generator=generator)[: epoch * config.batch].split(config.batch)
        return Schedule(tuple(batches), rates(config, len(batches)), epoch)

    def cut(self, config: Config, steps: int) -> Schedule:
        """The same batches for fewer steps, with a rate that falls to zero at their end."""
        return Schedule(self.batches[:steps], rates(config, steps), self.epoch)


def rates(config: Config, steps: int) -> tuple[float, ...]:
    return tuple(config.rate * min(1.0, (steps - step) / (config.decay * steps)) for step in range(steps))


@dataclass
class Student:
    """A network with its optimizer; a deep copy of it is a twin."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def fresh(config: Config, width: int, seed: int) -> Student:
        torch.manual_seed(seed)
        model = ResidualNet(width, config.blocks)
        return Student(model, torch.optim.AdamW(model.parameters(), lr=config.rate, weight_decay=config.weight_decay))

    def learn(self, images: Tensor, labels: Tensor, rate: float) -> float:
        """One step; the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def judge(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """Loss and accuracy in eval mode."""
        self.model.eval()
        scores = self.model(images)
        self.model.train()
        return float(cross_entropy(scores, labels)), float((scores.argmax(1) == labels).float().mean())


def train(student: Student, run: Run, data: Data, schedule: Schedule, start: int, stop: int, tick: Tick) -> None:
    """Steps `start` to `stop`, tested at the start, once an epoch, and at the end of all."""
    images, labels = data.train
    student.model.train()
    for step in range(start, stop):
        if step == start or step % schedule.epoch == 0:
            run.tested.append((step, round(student.judge(*data.test)[1], 6)))
        batch = schedule.batches[step]
        run.losses.append(round(student.learn(images[batch], labels[batch], schedule.rates[step]), 6))
        tick(f"seed {run.seed}: {run.arm}")
    if stop == schedule.steps:
        run.tested.append((stop, round(student.judge(*data.test)[1], 6)))


def run_seed(config: Config, data: Data, seed: int, tick: Tick) -> tuple[list[Run], list[outgrow.Growth]]:
    """All arms of one seed. The first half is trained once and shared by all that start small."""
    schedule = Schedule.of(config, len(data.train[0]), seed)
    half, steps = schedule.steps // 2, schedule.steps
    student, shared = Student.fresh(config, config.width, seed), Run(TWIN.name, seed)
    train(student, shared, data, schedule, 0, half, tick)
    shared.loss_before = shared.loss_after = student.judge(*data.train)[0]

    runs: list[Run] = []
    growths: list[outgrow.Growth] = []
    for arm in GROWN:
        grown = copy.deepcopy(student)
        run = replace(copy.deepcopy(shared), arm=arm.name)
        example = data.train[0][schedule.batches[half]]
        growth = outgrow.widen(
            grown.model, example, factor=config.factor, method=arm.method, optimizer=grown.optimizer, seed=seed
        )
        run.error, run.tolerance, run.growth_seconds = growth.max_error, growth.tolerance, growth.seconds
        run.loss_after = grown.judge(*data.train)[0]
        small, big = (flops // len(example) for flops in growth.flops)
        run.parameters, run.flops = growth.parameters[1], big
        run.training_flops = 3 * config.batch * (half * small + (steps - half) * big)
        train(grown, run, data, schedule, half, steps, tick)
        runs.append(run)
        growths.append(growth)

    shared.parameters, shared.flops = growths[0].parameters[0], small
    shared.training_flops = 3 * config.batch * steps * small
    train(student, shared, data, schedule, half, steps, tick)

    afresh: list[Run] = []
    for arm, count in ((SCRATCH, steps), (EQUAL, round(runs[0].training_flops / (3 * config.batch * big)))):
        scratch = Student.fresh(config, config.width * config.factor, seed)
        run = Run(arm.name, seed, parameters=sum(p.numel() for p in scratch.model.parameters()), flops=big)
        run.training_flops = 3 * config.batch * count * big
        train(scratch, run, data, schedule.cut(config, count), 0, count, tick)
        afresh.append(run)
    return [shared, *runs, *afresh], growths


def count_steps(config: Config, images: int) -> int:
    """Steps of all arms of a seed, about: for the progress bar."""
    steps = images // config.batch * config.epochs
    half = steps // 2
    return half + (1 + len(GROWN)) * (steps - half) + steps + round(0.63 * steps)


@contextmanager
def progress(total: int) -> Iterator[Tick]:
    """A bar on the terminal: rich's where it is installed, a plain one otherwise."""
    try:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        done = 0

        def plain(what: str) -> None:
            nonlocal done
            done += 1
            if done % 50 == 0 and sys.stderr.isatty():
                filled = min(30, 30 * done // total)
                print(f"\r[{'#' * filled}{' ' * (30 - filled)}] {what:<32}", end="", file=sys.stderr, flush=True)

        yield plain
        if sys.stderr.isatty():
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr)
        return
    columns = TextColumn("{task.description:<30}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, advance=1, description=what)
        bar.update(task, completed=total)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def of_arm(runs: Sequence[Run], arm: Arm) -> list[Run]:
    return [run for run in runs if run.arm == arm.name]


def summarise(config: Config, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row an arm; (mean, standard deviation over seeds) where there is a spread."""
    half = len(of_arm(runs, TWIN)[0].losses) // 2
    soon = slice(half, half + config.after)
    twins = [statistics.fmean(run.losses[soon]) for run in of_arm(runs, TWIN)]
    full = of_arm(runs, SCRATCH)[0].training_flops
    rows = []
    for arm in ARMS:
        mine = of_arm(runs, arm)
        row: dict[str, Any] = {"arm": arm.name, "title": arm.title, "note": arm.note}
        if arm is TWIN or arm in GROWN:
            ratios = [statistics.fmean(run.losses[soon]) / twin for run, twin in zip(mine, twins, strict=True)]
            row["loss_before"] = mean_and_spread([run.loss_before or 0.0 for run in mine])
            row["loss_after"] = mean_and_spread([run.loss_after or 0.0 for run in mine])
            row["relative_loss"] = mean_and_spread(ratios)
        if arm in GROWN:
            row["error"] = max(run.error or 0.0 for run in mine)
            row["tolerance"] = max(run.tolerance or 0.0 for run in mine)
        row["accuracy"] = mean_and_spread([100 * run.tested[-1][1] for run in mine])
        row["parameters"], row["flops"] = mine[0].parameters, mine[0].flops
        row["training_flops"] = mine[0].training_flops / full
        rows.append(row)
    return rows


def headings(config: Config) -> tuple[str, ...]:
    soon = f"next {config.after} steps"
    return "arm", "error", "loss before", "loss after", soon, "accuracy %", "parameters", "FLOPs", "in all"


def legend(config: Config) -> list[tuple[str, str]]:
    """What the columns of the table mean."""
    return [
        ("error", "largest difference of the outputs at the growth, relative to the largest output; worst seed"),
        ("loss before, after", "cross-entropy over all training images, eval mode, before and after the growth"),
        (f"next {config.after} steps", "mean training loss over them, relative to the twin that was not grown, same batches"),
        ("accuracy %", "on the test images after the last step; mean ± standard deviation over seeds"),
        ("FLOPs", "of a forward pass on one image: matrix products and convolutions"),
        ("in all", "FLOPs of the whole training (forward × 3), relative to the big network from scratch"),
    ]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    def pair(key: str) -> str:
        return f"{row[key][0]:.2f} ± {row[key][1]:.2f}" if key in row else "–"

    return (
        row["title"],
        f"{row['error']:.0e}" if "error" in row else "–",
        f"{row['loss_before'][0]:.4f}" if "loss_before" in row else "–",
        f"{row['loss_after'][0]:.4f}" if "loss_after" in row else "–",
        pair("relative_loss"),
        pair("accuracy"),
        f"{row['parameters']:,}",
        f"{row['flops']:,}",
        f"{row['training_flops']:.0%}",
    )


def text_table(config: Config, rows: Sequence[dict[str, Any]]) -> str:
    table = [headings(config), *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    sides = "<" + ">" * (len(widths) - 1)
    lines = []
    for line in table:
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, width, side in zip(line, widths, sides, strict=True)))
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def draw_curves(config: Config, runs: Sequence[Run]) -> bytes:
    """Left: the training loss around the growth. Right: test accuracy over the whole run. A PNG."""
    plt = pyplot()
    half = len(of_arm(runs, TWIN)[0].losses) // 2
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    lines = []
    for arm in (TWIN, *GROWN, SCRATCH):
        mine = of_arm(runs, arm)
        style = {"color": arm.colour, "linestyle": arm.dashes, "linewidth": 4.0 if arm is TWIN else 1.8}
        if arm is not SCRATCH:
            first = half - 15 if arm is TWIN else half - 1
            shown = range(first, half + 2 * config.after + 1)
            left.plot([s - half for s in shown], [statistics.fmean(run.losses[s] for run in mine) for s in shown], **style)
        steps = [step for step, _ in mine[0].tested]
        means = [mean_and_spread([run.tested[index][1] for run in mine]) for index in range(len(steps))]
        start = 0 if arm in (TWIN, SCRATCH) else steps.index(half)
        steps, means = steps[start:], means[start:]
        lines += right.plot(steps, [mean for mean, _ in means], marker=arm.marker, markersize=4, label=arm.title, **style)
    left.set(yscale="log", xlabel="steps since the growth", ylabel="training loss on the batch")
    left.set_title("Loss around the growth", loc="left", fontsize=11)
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10) if left.get_ylim()[0] <= tick <= left.get_ylim()[1]]
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    right.set(yscale="logit", xlabel="step", ylabel="test accuracy", ylim=(0.05, 0.995))
    right.set_title("Test accuracy", loc="left", fontsize=11)
    ticks = [0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99]
    right.set_yticks(ticks, [f"{tick:.0%}" for tick in ticks])
    right.minorticks_off()
    for axes, at in ((left, 0), (right, half)):
        axes.axvline(at, color="#bbbbbb", linewidth=1, zorder=0)
        axes.annotate("growth", (at, 1), (4, -2), xycoords=("data", "axes fraction"), textcoords="offset points", va="top")
        tidy(axes)
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False, handlelength=3, columnspacing=1.5)
    return png(figure)


def draw_ends(config: Config, rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> bytes:
    """Final test accuracy of every seed, arm by arm, with what the training cost. A PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(11, 3.4), layout="constrained")
    for place, (arm, row) in enumerate(zip(ARMS, rows, strict=True)):
        ends = [100 * run.tested[-1][1] for run in of_arm(runs, arm)]
        offsets = [place + 0.09 * (index - (len(ends) - 1) / 2) for index in range(len(ends))]
        axes.plot(ends, offsets, linestyle="", marker=arm.marker, color=arm.colour, markersize=6, alpha=0.85)
        axes.plot([row["accuracy"][0]] * 2, [place - 0.32, place + 0.32], color="black", linewidth=2)
    axes.set_yticks(range(len(ARMS)), [f"{row['title']}  ({row['training_flops']:.0%})" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("test accuracy after the last step, %: each seed, and the mean (bar)")
    axes.set_title("How it ended (in brackets: training FLOPs, relative to scratch)", loc="left", fontsize=11)
    tidy(axes, "x")
    return png(figure)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def tidy(axes: Any, lines: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=lines, color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    pyplot().close(figure)
    return buffer.getvalue()


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .55rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } tr.random td { color: #9c3d00 }
dt { font-weight: 600 } dd { margin: 0 0 .3rem 1.2rem } img { max-width: 100% }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; line-height: 1.35 }
"""


def report(config: Config, rows: Sequence[dict[str, Any]], pictures: Sequence[tuple[str, bytes]], facts: dict[str, Any]) -> str:
    """The whole report as one HTML page that needs no other file."""
    parts = ["<!doctype html><html lang='en'><meta charset='utf-8'><title>outgrow: demo</title>", f"<style>{STYLE}</style>"]
    parts.append("<h1>Growing a network in the middle of its training</h1>")
    parts.append(
        f"<p>A residual network of width {config.width} learns scikit-learn's digits. After half of its {facts['steps']} steps "
        f"it is widened to {config.width * config.factor} by each method, AdamW's state with it, and goes on with the same "
        f"batches. {len(config.seeds)} seeds. Random padding is the one method here that does not preserve the function.</p>"
    )
    for alt, picture in pictures:
        parts.append(f"<p><img alt='{html.escape(alt)}' src='data:image/png;base64,{base64.b64encode(picture).decode()}'></p>")
    parts.append("<h2>The numbers</h2><table><tr>" + "".join(f"<th>{html.escape(t)}</th>" for t in headings(config)) + "</tr>")
    for row in rows:
        body = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
        parts.append(f"<tr class='{'random' if row['arm'] == 'random' else ''}'>{body}</tr>")
    parts.append("</table><h2>The columns</h2><dl>")
    parts += [f"<dt>{html.escape(term)}</dt><dd>{html.escape(text)}</dd>" for term, text in legend(config)]
    parts.append("</dl><h2>The arms</h2><dl>")
    parts += [f"<dt>{html.escape(arm.title)}</dt><dd>{html.escape(arm.note)}</dd>" for arm in ARMS]
    parts.append(f"</dl><h2>One growth, as outgrow prints it (r2r, seed {config.seeds[0]})</h2>")
    parts.append(f"<pre>{html.escape(facts['growth'])}</pre>")
    parts.append("<h2>How this was made</h2>")
    made = {"config": asdict(config), "versions": facts["versions"], "seconds": facts["seconds"], "code": facts["code"]}
    parts.append(f"<pre>{html.escape(json.dumps(made, indent=1))}</pre></html>")
    return "\n".join(parts)


def versions() -> dict[str, str]:
    names = ("outgrow", "torch", "numpy", "scikit-learn", "matplotlib")
    found = {name: importlib.metadata.version(name) for name in names}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        **found,
    }


def parse(argv: Sequence[str] | None) -> tuple[Config, Path]:
    defaults = Config()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report (default: demo)")
    parser.add_argument("--seeds", type=int, default=len(defaults.seeds), help="how many seeds (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=defaults.epochs, help="an even number (default: %(default)s)")
    parser.add_argument("--width", type=int, default=defaults.width, help="channels before the growth (default: %(default)s)")
    given = parser.parse_args(argv)
    return replace(defaults, seeds=tuple(range(given.seeds)), epochs=given.epochs, width=given.width), given.out


def main(argv: Sequence[str] | None = None) -> None:
    started = time.perf_counter()
    config, out = parse(argv)
    torch.set_num_threads(1)  # networks this small gain nothing from more, and one thread gives the same numbers every time
    data = load_data()
    runs: list[Run] = []
    with progress(len(config.seeds) * count_steps(config, len(data.train[0]))) as tick:
        for seed in config.seeds:
            done, growths = run_seed(config, data, seed, tick)
            runs += done
            if seed == config.seeds[0]:
                growth = str(growths[0])
    rows = summarise(config, runs)
    print(text_table(config, rows), end="\n\n")
    for term, text in legend(config):
        print(f"{term}: {text}")
    pictures = [
        ("Training loss around the growth, and test accuracy over the run", draw_curves(config, runs)),
        ("Final test accuracy of every seed and arm", draw_ends(config, rows, runs)),
    ]
    facts: dict[str, Any] = {
        "steps": len(of_arm(runs, TWIN)[0].losses),
        "growth": growth,
        "versions": versions(),
        "code": "sha256:" + hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "curves.png").write_bytes(pictures[0][1])
    (out / "ends.png").write_bytes(pictures[1][1])
    (out / "report.html").write_text(report(config, rows, pictures, facts), encoding="utf-8")
    lines = [f'"{name}": {json.dumps(fact)}' for name, fact in {"config": asdict(config), **facts, "table": rows}.items()]
    lines.append('"runs": [\n' + ",\n".join(json.dumps(asdict(run)) for run in runs) + "\n]")
    (out / "results.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"\n{facts['seconds']:.0f} s. Report: {(out / 'report.html').resolve()}")


if __name__ == "__main__":
    main()
