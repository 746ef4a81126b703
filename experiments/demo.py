"""The demo: a small network is trained and is too small. Grow it and train on, train it on as it is, or start over?

    python -m experiments.demo            trains, prints the table, writes demo/report.html; about a minute, no download

Interrupted, it continues where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.pages.chart_svg import Panel, Series, picture
from experiments.pages.parts import made_by, prose, table
from experiments.reading.curves import Results
from experiments.reading.demo_lines import (
    LABELS,
    SHORT,
    budgets,
    ends,
    lead,
    losses,
    mark,
    sentences,
    spread,
    start,
    text_table,
)
from experiments.reading.result_files import facts, read_all, write_arm
from experiments.reading.words import signed
from experiments.report import framed
from experiments.setting.arms import Arm
from experiments.setting.data import digits
from experiments.setting.demo_arms import BUDGETS, EPOCHS, demo_arms
from experiments.setting.segments import all_segments
from experiments.training.eager import Eager, shape_of
from experiments.training.progress import Progress
from experiments.training.store import Store
from experiments.training.train_segments import Training

SEEDS, BATCH = 5, 32
PICTURE = Path("docs") / "demo" / "demo.svg"
COLOUR = {"grown": "blue", "on": "grey", "scratch": "black", "random": "orange"}
DASH = {"random": (4.0, 1.3, 1.2, 1.3)}


def looks(way: str, x: Sequence[float], mean: Sequence[float], sd: Sequence[float], n: int) -> dict[str, Any]:
    """A line as the page's plots take it."""
    line = {"epochs": list(x), "mean": [round(v, 4) for v in mean], "sd": [round(v, 4) for v in sd], "cuts": [], "grown": None}
    style = {"colour": COLOUR[way], "dash": list(DASH.get(way, ())), "width": 1.4 if way == "grown" else 1.1}
    return {"name": way, "label": LABELS[way], "short": SHORT[way], "nothing": None, "reuse": {**line, "n": n}, **style}


def data(results: Results) -> dict[str, Any]:
    """Both plots: accuracy by budget, and the loss around the growth."""
    found, seeds = budgets(results), len(results["small"]["seeds"])
    by_budget = []
    for way in LABELS:
        values = [ends(results, way, budget) for budget in found]
        sd = [statistics.stdev(one) if seeds > 1 else 0.0 for one in values]
        by_budget.append(looks(way, found, [statistics.fmean(one) for one in values], sd, seeds))
    around = []
    for way in ("grown", "on", "random"):
        steps, mean = losses(results, way)
        around.append(looks(way, steps, mean, [0.0] * len(mean), 1))
    alike = {"account": "reuse", "ends": True, "plain": True}
    return {
        "budgets": {"title": "Accuracy by budget", "kind": "budgets", "below": 30, "arms": by_budget, **alike},
        "losses": {"title": "Training loss around the growth", "kind": "steps", "arms": around, **alike},
    }


def drawn(results: Results) -> str:
    """Both plots as one SVG file for the documentation."""
    plots, first = data(results), statistics.fmean(start(results))

    def series(arm: dict[str, Any], band: bool) -> Series:
        dash = "7 2.5 2 2.5" if arm["name"] == "random" else ""
        line = arm["reuse"]
        band_of = line["sd"] if band else ()
        return Series(arm["short"], arm["colour"], line["epochs"], line["mean"], band_of, dash, 1.7 * arm["width"])

    by_budget = [series(arm, True) for arm in plots["budgets"]["arms"]]
    around = [series(arm, False) for arm in plots["losses"]["arms"]]
    top = max(max(one.y) for one in around)
    return picture(
        "The demo: a trained small network is grown, trained on as it is, or replaced by a wide one from the beginning",
        [
            Panel(
                "At equal FLOPs",
                "epochs of the wide network",
                "test accuracy, %",
                by_budget,
                budgets(results),
                range(70, 101, 5),
                70,
                100,
                "x",
                (first, "the small network"),
            ),
            Panel(
                "At the growth",
                "steps after the growth",
                "training loss",
                around,
                range(-30, 61, 15),
                [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if tick < top],
                0.1,
                1.2 * top,
                "y",
            ),
        ],
    )


def lead_table(results: Results) -> str:
    """The grown network against each rival, in points with intervals."""
    found, rows = budgets(results), []
    for way in LABELS:
        rows.append((LABELS[way], *(spread(ends(results, way, budget)).replace("± ", "±\u00a0") for budget in found)))
    for rival in ("on", "scratch", "random"):
        cells = []
        for budget in found:
            one = lead(results, rival, budget)
            span = f'<br><span class="quiet">[{signed(one.low)}, {signed(one.high)}]</span>' if one.n > 1 else ""
            cells.append(f"{mark(one)}\u00a0{signed(one.value)}{span}")
        rows.append((f"grown − {SHORT[rival]}, points", *cells))
    return table(("budget in epochs", *map(str, found)), rows, "Test accuracy in per cent, and the lead of the grown network")


def page(results: Results) -> str:
    said, at_growth = sentences(results)
    plots = {
        key: f'<figure class="plot" data-group="{key}"><div class="view"></div><noscript><p>The table has the values.</p>'
        "</noscript></figure>"
        for key in ("budgets", "losses")
    }
    fill = {
        "summary": prose(said),
        "at_growth": prose(at_growth),
        "table": lead_table(results),
        "small": f"{statistics.fmean(start(results)):.1f}",
        "seeds": str(len(results["small"]["seeds"])),
        "made": made_by(results),
        **plots,
    }
    return framed("demo.html", "outgrow: the demo", data(results), fill)


def train(arms: Sequence[Arm], seeds: Sequence[int], folder: Path) -> Results:
    """Train all arms, and read their results back from the files that are written."""
    store = Store(folder / "work")
    segments = all_segments(arms, seeds)
    training = Training(segments, digits(), Eager, shape_of, store, batch=BATCH)
    with Progress(training.epochs_left()) as training.tell:
        training.run()
    about = {"command": "make demo", "data": "digits", "engine": "eager", "precision": "ieee", **facts("cpu")}
    for arm in arms:
        write_arm(folder / "results", arm, seeds, store, about)
    return read_all(folder / "results")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where results and report go (default: demo)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many (default: {SEEDS})")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of the small network at first (default: {EPOCHS})")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=BUDGETS, help="in epochs of the wide network (default: 1 2 4 8)"
    )
    parser.add_argument("--kept", action="store_true", help="only draw docs/demo/demo.svg again, from the committed results")
    options = parser.parse_args(arguments)
    if options.kept:
        PICTURE.write_text(drawn(read_all(Path(__file__).parent / "results" / "demo")), encoding="utf-8")
        return 0
    started = time.monotonic()
    results = train(demo_arms(options.epochs, tuple(options.budgets)), range(options.seeds), options.out)
    path = options.out / "report.html"
    path.write_text(page(results), encoding="utf-8")
    said, at_growth = sentences(results)
    print(f"\nThe small network has {spread(start(results))} % right. {options.seeds} seeds, equal FLOPs:\n")
    print(text_table(results))
    print("\n▲ ahead, ▼ behind, · not settled by these seeds (95 % intervals)")
    print(f"\n{said}\n\n{at_growth}\n\n{time.monotonic() - started:.0f} s. The report: {path}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # such small networks are slower with more
    sys.exit(main())
