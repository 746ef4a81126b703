"""The paper's figures, drawn again from result files, as PNG and PDF:  python -m experiments.figures [--results F] [--out F]

A line is the mean over seeds and its band one standard deviation of them. Where a whole training is shown, both are running
means over five epochs, never over a growth; what happens near a growth is shown as it was measured. What grown arms share, the
small network before its growth, is drawn once, thin and grey. The same results give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pages.looks import COLOURS, look
from experiments.reading.curves import Mean, has, mean_curve, roads
from experiments.reading.diversity import WHEN, read_filters
from experiments.reading.groups import GROUPS, Group
from experiments.reading.result_files import ResultsError, read_paper, unusable
from experiments.reading.tables import PAPER_IMAGES, Numbers, image_error, last, numbers

RESULTS, OUT = Path(__file__).parent / "results" / "table", Path("report")
COLUMN = 3.4  # inches: a column of the paper
AXIS = {"epochs": ("epochs", 1.0), "flops": ("TFLOP", 1e12), "seconds": ("seconds on the device", 1.0)}
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "legend.labelspacing": 0.25,
    "legend.borderaxespad": 0.2,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


@contextmanager
def drawing() -> Iterator[Any]:
    """matplotlib without a screen, in our style, with the user's settings left alone."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ResultsError(f"figures are drawn by matplotlib, which is not there ({error}): pip install matplotlib") from error

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": matplotlib.rcParams["backend"]}):
        yield Figure


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Both files, with nothing in them that changes from day to day."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.pdf"]
    figure.savefig(paths[0], metadata={"Software": None})
    figure.set_layout_engine("none")  # the layout is found; it need not be again
    figure.savefig(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return paths


def running(values: Any, cuts: Sequence[int], width: int) -> Any:
    """A centred running mean within each stage; narrower at its ends."""
    if width <= 1:
        return values
    smooth, half = np.array(values, dtype=float), width // 2
    for start, end in zip(cuts, [*cuts[1:], len(values)], strict=True):
        for place in range(start, end):
            reach = min(half, place - start, end - 1 - place)
            smooth[place] = np.mean(values[place - reach : place + reach + 1])
    return smooth


def line(axes: Any, curve: Mean, axis: str, arm: str, smooth: int = 1, label: str | None = None, seen: Any = None) -> None:
    """A curve from its growth on; what lies before is drawn unless `seen` has it already."""
    style, start = look(arm), max((curve.grown or 0) - 1, 0)
    x = curve.x(axis) / AXIS[axis][1]
    y, spread = running(curve.accuracy, curve.cuts, smooth), running(curve.spread, curve.cuts, smooth)
    early, late, dash = slice(0, start + 1), slice(start, None), (0, style.dash) if style.dash else "-"
    shared = curve.accuracy[early].tobytes()
    if start and (seen is None or shared not in seen):
        axes.fill_between(x[early], (y - spread)[early], (y + spread)[early], color="#888888", alpha=0.13, linewidth=0)
        axes.plot(x[early], y[early], color="#888888", linewidth=0.9, linestyle=dash)
        if seen is not None:
            seen.add(shared)
    axes.fill_between(x[late], (y - spread)[late], (y + spread)[late], color=style.hex, alpha=0.13, linewidth=0)
    axes.plot(x[late], y[late], color=style.hex, linestyle=dash, linewidth=1.1 * style.width, label=label or style.label)


def finish(axes: Any, axis: str, low: float, high: float, end: float) -> None:
    axes.set_xlabel(AXIS[axis][0])
    axes.set_ylabel("test accuracy (%)")
    axes.set_ylim(low, high)
    axes.set_xlim(0, end)
    axes.locator_params(axis="y", integer=True, nbins=7)


def floor(results: Any, arms: Sequence[str], below: float) -> float:
    """Where the accuracy axis begins: so much below the lowest end of all arms, in fives."""
    return max(0.0, 5 * np.floor((min(min(last(results, name, 10)) for name in arms) - below) / 5))


def curves(
    numbers: Numbers,
    group: Group,
    axis: str,
    account: str,
    axes: Any,
    smooth: int,
    below: float,
    stop: float | None = None,
    measure: str = "accuracy",
) -> None:
    """All arms of a group in one pair of axes; `stop` ends the x axis early."""
    results, high, end, seen = numbers.results, 0.0, 0.0, set[bytes]()
    for name in group.present(results):
        curve = mean_curve(results, name, account, measure)
        if curve is not None:
            line(axes, curve, axis, name, smooth, seen=seen)
            high = max(high, float((curve.accuracy + curve.spread).max()))
            end = max(end, float(curve.x(axis)[-1]) / AXIS[axis][1])
    if end:
        if seen:
            axes.plot([], [], color="#888888", linewidth=0.9, label="before the growth")
        finish(axes, axis, floor(results, group.present(results), below), high + 1, stop or end)


def legend(figure: Any, axes: Any, columns: int = 2) -> None:
    """Above the plot, where no line is."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, columnspacing=1.4)


def convergence(numbers: Numbers, group: Group, figure: Any) -> None:
    """Students from their growth on, beside the network from scratch; the teacher's end is a thin line."""
    axes = figure.subplots()
    curves(numbers, group, "epochs", "reuse", axes, 5, 5)
    for name in group.teachers[:1]:
        if name in numbers.results:
            level = float(np.mean(last(numbers.results, name, 10)))
            axes.axhline(level, color=COLOURS["red"], linewidth=0.8, linestyle=(0, (2.5, 1.2)), label="teacher at its end")
    legend(figure, axes)


def epoch_cost(numbers: Numbers, group: Group, axis: str, epochs: float) -> float | None:
    """What so many epochs of the network from scratch cost, in the axis's unit."""
    curve = mean_curve(numbers.results, group.scratch or "") if group.scratch in numbers.results else None
    if curve is None or curve.epochs[-1] <= epochs:
        return None
    return float(np.interp(epochs, curve.epochs, curve.x(axis))) / AXIS[axis][1]


def faster(axis: str, epochs: float | None) -> Callable[[Numbers, Group, Any], None]:
    """The faster-training figure on one axis: whole, or as much as so many epochs of the large network cost."""

    def draw(numbers: Numbers, group: Group, figure: Any) -> None:
        axes = figure.subplots()
        stop = None if epochs is None else epoch_cost(numbers, group, axis, epochs)
        curves(numbers, group, axis, "nothing", axes, 5 if stop is None else 1, 12 if stop is None else 30, stop)
        legend(figure, axes)

    return draw


def accounts(numbers: Numbers, group: Group, figure: Any) -> None:
    """Accuracy by FLOPs in both accounts, side by side."""
    for axes, account, title in zip(
        figure.subplots(1, 2, sharey=True), ("nothing", "reuse"), ("from nothing", "reuse"), strict=True
    ):
        curves(numbers, group, "flops", account, axes, 5, 12)
        axes.set_title(f"{title}: " + ("the teacher counts" if account == "nothing" else "the teacher is there"), loc="left")
        legend(figure, axes, 3) if account == "nothing" else axes.set_ylabel("")


def overfitting(numbers: Numbers, group: Group, figure: Any) -> None:
    axes = figure.subplots()
    curves(numbers, group, "epochs", "reuse", axes, 5, 3)
    legend(figure, axes)


def training(account: str) -> Callable[[Numbers, Group, Any], None]:
    """Accuracy on the training batches, as figures 7 and 10 of the paper have it."""

    def draw(numbers: Numbers, group: Group, figure: Any) -> None:
        axes = figure.subplots()
        curves(numbers, group, "epochs", account, axes, 5, 3, measure="running_accuracy")
        axes.set_ylabel("training accuracy (%)")
        legend(figure, axes)

    return draw


def initialisation(numbers: Numbers, group: Group, figure: Any) -> None:
    """The whole run, and the epochs around the growth as they were measured."""
    whole, near = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    curves(numbers, group, "epochs", "nothing", whole, 5, 5)
    curves(numbers, group, "epochs", "nothing", near, 1, 5)
    first = mean_curve(numbers.results, group.present(numbers.results)[0])
    if first is not None and first.grown is not None:
        at = float(first.epochs[first.grown])
        near.set_xlim(at - 3, at + 10)
        for axes in (whole, near):
            axes.axvline(at, color="#999999", linewidth=0.6)
    near.set_title("around the growth", loc="left")
    whole.set_title("whole run (running mean)", loc="left")
    near.set_ylabel("")
    legend(figure, whole, 3)


def appendix_b(numbers: Numbers, _: Group, figure: Any) -> None:
    """As in the paper's appendix B: deepening left, widening right; by updates above, by FLOPs below; seconds in the legend."""
    grid = figure.subplots(2, 2, sharey="row")
    own = bool(of("apb3-widen").present(numbers.results))  # its own network, where that was run
    for column, key in enumerate(("apb3-deepen", "apb3-widen") if own else ("apb-deepen", "apb-widen")):
        arms = of(key).present(numbers.results)
        low, top = floor(numbers.results, arms, 20), max(max(last(numbers.results, name)) for name in arms) + 4
        for row, axis in enumerate(("epochs", "flops")):
            axes, seen = grid[row][column], set[bytes]()
            for name in of(key).present(numbers.results):
                curve = mean_curve(numbers.results, name)
                assert curve is not None
                seconds = [float(one.seconds[-1]) for one in roads(numbers.results, name)]
                took = f"{look(name).label} ({np.mean(seconds):.2f} ± {np.std(seconds):.2f} s)"
                line(axes, curve, axis, name, 5, took, seen)
                finish(axes, axis, low, top, float(curve.x(axis)[-1]) / AXIS[axis][1])
                axes.set_ylabel("" if column else axes.get_ylabel())
        grid[0][column].set_title(of(key).title, loc="left")
        grid[0][column].legend(loc="lower right")


def final_chart(numbers: Numbers, _: Group, figure: Any) -> None:
    """Final accuracies with one standard deviation; the paper's numbers as open diamonds."""
    axes, place, ticks, labels = figure.subplots(), 0.0, [], []
    for group in GROUPS:
        rows = [row for name in group.present(numbers.results) if (row := numbers.end(name))]
        if not rows:
            continue
        axes.text(0, place, group.title, transform=axes.get_yaxis_transform(), ha="left", va="center", weight="bold", size=7)
        place += 1
        for row in rows:
            colour = look(row.arm).hex
            axes.errorbar(row.mean, place, xerr=row.sd, fmt="o", color=colour, ms=4, elinewidth=1, capsize=2, capthick=0.8)
            if row.paper is not None:
                error = image_error(row.paper, PAPER_IMAGES)
                style = {"mfc": "none", "mec": "#444444", "ms": 4.5, "mew": 0.9, "elinewidth": 0.6}
                axes.errorbar(row.paper, place, xerr=error, fmt="D", ecolor="#999999", **style)
            ticks.append(place)
            labels.append(look(row.arm).label)
            place += 1
        place += 0.35
    axes.set_yticks(ticks, labels)
    axes.set_ylim(place - 0.2, -0.8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    low, high = axes.get_xlim()
    axes.set_xlim(low - 0.12 * (high - low), high)
    axes.set_xlabel("accuracy after the last epoch (%)")
    axes.plot([], [], "o", color="#444444", ms=4, label="ours ± s.d.")
    axes.plot([], [], "D", mfc="none", mec="#444444", ms=4.5, label="the paper ± s.e.")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.09), ncols=2, borderaxespad=0)


def picture(weights: Any, columns: int = 8) -> Any:
    """Filters (n, 3, h, w) as one picture of tiles with clear gaps, each scaled to its own range about grey."""
    n, _, height, width = weights.shape
    rows = -(-n // columns)
    sheet = np.ones((rows * (height + 1) - 1, columns * (width + 1) - 1, 4)) * (1, 1, 1, 0)
    for number, weight in enumerate(weights):
        top, left = (number // columns) * (height + 1), (number % columns) * (width + 1)
        size = np.abs(weight).max() or 1.0
        tile = sheet[top : top + height, left : left + width]
        tile[..., :3], tile[..., 3] = (0.5 + 0.5 * weight / size).transpose(1, 2, 0), 1
    return sheet


def filter_sheet(numbers: Numbers, _: Group, figure: Any) -> None:
    """The first seed's filters before the growth, just after it, and at the end; the numbers are means over seeds."""
    arms = [arm for arm in of("viz").arms if any(name.startswith(arm + "/") for name in numbers.filters)]
    grid = figure.subplots(3, len(arms), squeeze=False, height_ratios=(1, 2, 2))
    for column, arm in enumerate(arms):
        seed = min((name.split("/")[1] for name in numbers.filters if name.startswith(arm + "/")), key=int)
        for row, when in enumerate(WHEN):
            axes = grid[row][column]
            axes.axis("off")
            axes.imshow(picture(numbers.filters[f"{arm}/{seed}/{when}"]), interpolation="nearest")
            axes.set_anchor("N")
            seen = next(one for one in numbers.diversity if (one.arm, one.when) == (arm, when))
            twins = "" if seen.symmetry is None else f", symmetry {seen.symmetry:.2f}"
            moment = {"before": "before growth", "after": "just after", "end": "at the end"}[when]
            axes.set_title(
                (f"{look(arm).label}\n" if row == 0 else "") + f"{moment}: diversity {seen.diversity:.2f}{twins}", size=7
            )


TALL = 2.6
Plan = tuple[str, str, Callable[[Numbers, Group, Any], None], tuple[float, float]]
FIGURES: tuple[Plan, ...] = (
    ("nct-widen", "nct-widen", convergence, (COLUMN, TALL)),
    ("nct-deepen", "nct-deepen", convergence, (COLUMN, TALL)),
    ("nct-widen-accounts", "nct-widen", accounts, (2 * COLUMN, TALL)),
    ("nct-deepen-accounts", "nct-deepen", accounts, (2 * COLUMN, TALL)),
    ("overfitting", "of", overfitting, (COLUMN, TALL)),
    ("initialisation", "bi", initialisation, (1.5 * COLUMN, TALL)),
    *(
        (f"{key}-{axis}{'' if epochs is None else '-start'}", key, faster(axis, epochs), (COLUMN, TALL))
        for key in ("ftt-widen", "ftt-deepen")
        for axis, epochs in (("epochs", None), ("flops", 30.0), ("flops", None), ("seconds", None))
    ),
)


def draw_all(numbers: Numbers, folder: Path) -> list[Path]:
    """Every figure for which there are results; the paths that were written."""
    paths: list[Path] = []
    plans = [plan for plan in FIGURES if of(plan[1]).present(numbers.results)]
    plans.append(("final", "bi", final_chart, (COLUMN * 1.35, 0.55 + 0.185 * (len(numbers.final) + 5))))
    for name, key, account in (("overfitting-training", "of", "reuse"), ("initialisation-training", "bi", "nothing")):
        arms = of(key).present(numbers.results)
        if arms and all(has(numbers.results, arm, "running_accuracy") for arm in arms):
            plans.append((name, key, training(account), (COLUMN, TALL)))
    if any(of(key).present(numbers.results) for key in ("apb-widen", "apb-deepen", "apb3-widen", "apb3-deepen")):
        plans.append(("appendix-b", "apb-widen", appendix_b, (2 * COLUMN, 1.75 * TALL)))
    if numbers.filters:
        plans.append(("filters", "viz", filter_sheet, (2 * COLUMN, 3.45)))
    with drawing() as Figure:
        for name, key, draw, size in plans:
            figure = Figure(figsize=size)
            draw(numbers, of(key), figure)
            paths += save(figure, folder, name)
    return paths


def of(key: str) -> Group:
    return next(group for group in GROUPS if group.key == key)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description="Draw the paper's figures from results.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder of results (default: the committed ones)")
    parser.add_argument("--out", type=Path, default=OUT / "figures", help="where figures go (default: report/figures)")
    options = parser.parse_args(arguments)
    try:
        found = numbers(read_paper(options.results), read_filters(options.results))
        paths = draw_all(found, options.out)
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(unusable(error)) from error
    print(
        f"{len(paths)} files are in {options.out}"
        + ("" if found.filters else "; no filters.safetensors, so no filter pictures")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
