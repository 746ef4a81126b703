"""The demo: a network that grows while it learns, by every method, in about a minute and without a download.

    python -m experiments.demo            trains, prints the tables, writes demo/report.html

Interrupted, it goes on where it was.
"""

from __future__ import annotations

import argparse
import base64
import io
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.figures import drawing
from experiments.pages.looks import look
from experiments.pages.parts import made_by, table
from experiments.reading.curves import Results
from experiments.reading.result_files import facts, read_all, write_arm
from experiments.reading.tables import Numbers, numbers
from experiments.report import arm_data, framed
from experiments.setting.arms import Arm
from experiments.setting.data import digits
from experiments.setting.demo_arms import EPOCHS, demo_arms
from experiments.setting.models import Net
from experiments.setting.segments import all_segments
from experiments.training.eager import Eager, shape_of
from experiments.training.progress import Progress
from experiments.training.store import Store
from experiments.training.train_segments import Training

SEEDS, BATCH, SOON = 4, 64, 20
GROUPS = {"widen": "Twice as wide", "deepen": "Twice as deep"}
HEAD = ("arm", "error", "loss before", "loss after", "next 20 steps", "accuracy %", "parameters", "FLOPs in all")


def names(results: Results, what: str) -> list[str]:
    """The arms of one way to grow, the network that is not grown first."""
    return [arm.name for arm in demo_arms() if arm.name in results and arm.name.startswith(("small", what))]


def row(results: Results, name: str, full: float) -> tuple[str, ...]:
    """What the table says of an arm, as means over seeds; `full`: FLOPs of the big network from scratch."""
    seeds = list(results[name]["curves"].values())
    twins = list(results["small"]["curves"].values())
    growth = seeds[0][-1]["growth"]
    spent = statistics.fmean(sum(stage["flops"][-1] for stage in stages) for stages in seeds)
    final = [100 * stages[-1]["accuracy"][-1] for stages in seeds]
    cells = ["–"] * 4
    if len(seeds[0]) > 1:
        before = statistics.fmean(stages[0]["test_loss"][-1] for stages in seeds)
        after = statistics.fmean(stages[1]["test_loss"][0] for stages in seeds)
        ratios = [soon(stages) / soon(twin) for stages, twin in zip(seeds, twins, strict=True)]
        error = max((stages[1]["growth"].get("error", 0.0) for stages in seeds), default=0.0)
        cells = [f"{error:.0e}" if growth else "–", f"{before:.4f}", f"{after:.4f}", spread(ratios, 2)]
    size = (
        growth["parameters"][1] if growth else sum(p.numel() for p in Net(**results[name]["arm"]["net"]).build(0).parameters())
    )
    return (label(name), *cells, spread(final, 1), f"{size:,}", f"{100 * spent / full:.0f} %")


def soon(stages: Sequence[dict[str, Any]]) -> float:
    """The mean training loss of the first steps after the growth."""
    return statistics.fmean(stages[1]["steps"][:SOON])


def spread(values: Sequence[float], digits: int) -> str:
    rest = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{rest}"


def label(name: str) -> str:
    plain = name.split("-", 1)[-1]
    told = {"small": "not grown", "random": "random (does not preserve)", "copy": "copies (does not preserve)"}
    return told.get(plain, plain)


def rows(results: Results, what: str) -> list[tuple[str, ...]]:
    full = statistics.fmean(stages[-1]["flops"][-1] for stages in results[f"{what}-scratch"]["curves"].values())
    return [row(results, name, full) for name in names(results, what)]


def text_table(results: Results, what: str) -> str:
    """A table for the terminal and for the README."""
    lines = [HEAD, *rows(results, what)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]

    def laid(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

    return "\n".join([laid(HEAD), "  ".join("─" * width for width in widths), *(laid(line) for line in lines[1:])])


def summary(results: Results) -> str:
    """The headline, in numbers."""
    exact = [name for name in results if name.endswith(("-r2r", "-net2net", "-netmorph"))]
    seeds = [stages for name in exact for stages in results[name]["curves"].values()]
    moved = max(abs(stages[1]["test_loss"][0] - stages[0]["test_loss"][-1]) for stages in seeds)
    error = max(stages[1]["growth"]["error"] for stages in seeds)
    end = {
        name: statistics.fmean(100 * stages[-1]["accuracy"][-1] for stages in results[name]["curves"].values())
        for name in results
    }
    return (
        f"{len(seeds)} growths that preserve the function moved its outputs by {error:.0e} of the largest one at most, and its "
        f"loss by {moved:.5f} at most. At the end the network that was not grown has {end['small']:.1f} % right; widened by "
        f"r2r it has {end['widen-r2r']:.1f} %, and the big one from scratch, for as many FLOPs, "
        f"{end['widen-scratch, same FLOPs']:.1f} %."
    )


def picture(results: Results) -> bytes:
    """Training loss around the growth, as PNG."""
    with drawing() as figures:
        figure = figures(figsize=(7.2, 2.9))
        both = figure.subplots(1, 2, sharey=True)
        for axes, (what, title) in zip(both, GROUPS.items(), strict=True):
            for name in names(results, what):
                stages = list(results[name]["curves"].values())
                if "scratch" in name:
                    continue
                style = look(name)
                losses = [one[0]["last"] + one[1]["steps"][:60] for one in stages]
                mean = [statistics.fmean(values) for values in zip(*losses, strict=True)]
                start = len(stages[0][0]["last"])
                dashes = {"dashes": style.dash} if style.dash else {}
                steps = [step - start for step in range(len(mean))]
                axes.plot(steps, mean, color=style.hex, lw=1.4 * style.width, label=label(name), **dashes)
            axes.axvline(0, color="#999999", lw=0.8, zorder=0)
            axes.set(title=title, xlabel="steps after the growth", yscale="log")
            axes.legend()
        both[0].set_ylabel("training loss")
        stream = io.BytesIO()
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


def page(found: Numbers) -> str:
    results = found.results
    tables = "".join(table(HEAD, rows(results, what), title) for what, title in GROUPS.items())
    plots = "".join(
        f'<figure class="plot" data-group="{key}"><h3>{title}</h3><div class="view"></div></figure>'
        for key, title in GROUPS.items()
    )
    data = {
        key: {"title": title, "arms": [arm_data(found, name) for name in names(results, key)]} for key, title in GROUPS.items()
    }
    fill = {
        "summary": summary(results),
        "picture": base64.b64encode(picture(results)).decode(),
        "table": tables,
        "plots": plots,
        "made": made_by(found),
    }
    return framed("demo.html", "outgrow: the demo", data, fill)


def train(arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> Results:
    """Train all arms, and read their results back from the files that are written."""
    store = Store(folder / "work")
    segments = all_segments(arms, seeds)
    training = Training(segments, digits(), Eager, shape_of, store, batch=BATCH)
    with Progress(training.epochs_left()) as training.tell:
        training.run()
    for arm in arms:
        write_arm(
            folder / "results",
            arm,
            seeds,
            store,
            {"command": "make demo", "data": "digits", "engine": "eager", "precision": "ieee", **facts("cpu")},
        )
    return read_all(folder / "results")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where results and report go (default: demo)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default: {SEEDS})")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help=f"the network is grown after half of them (default: {EPOCHS})"
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    results = train(demo_arms(options.epochs), range(options.seeds), options.out)
    for what, title in GROUPS.items():
        print(f"\n{title}, after half of {options.epochs} epochs; {options.seeds} seeds\n\n{text_table(results, what)}")
    path = options.out / "report.html"
    path.write_text(page(numbers(results, {})), encoding="utf-8")
    print(f"\n{summary(results)}\n\n{time.monotonic() - started:.0f} s. The report: {path}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # such small networks are slower with more
    sys.exit(main())
