"""Pictures of the honest comparison: final accuracy by budget, for print and for the report's plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.figures import COLUMN, drawing, save
from experiments.pages.chart_svg import Panel, Series, picture
from experiments.pages.looks import COLOURS
from experiments.reading.comparison import Comparison, Line, flops
from experiments.reading.own_tuned import fairest
from experiments.reading.tables import spread
from experiments.reading.ways import ACCOUNTS, VERBS, in_order, name_of

COLOUR = {
    "scratch": "black",
    "widen": "grey",
    "deepen": "grey",
    "r2r": "blue",
    "r2r-0.1": "blue",
    "r2r-0.5": "blue",
    "r2r-flops": "blue",
    "r2r-rewarm": "blue",
    "r2r-repeak": "blue",
    "r2r-paper": "sky",
    "net2net": "purple",
    "netmorph": "green",
    "copies": "sky",
    "copy": "red",
    "fade": "red",
    "random": "orange",
    "deepen-first": "purple",
    "widen-first": "green",
}
DASH: dict[str, tuple[float, ...]] = {
    "r2r-0.1": (1.2, 1.2),
    "r2r-0.5": (5, 1.6),
    "r2r-flops": (1.2, 1.2),
    "r2r-rewarm": (5, 1.6),
    "r2r-repeak": (6, 1.5, 1, 1.5),
    "net2net": (1.2, 1.2),
    "netmorph": (5, 1.6),
    "copies": (6, 1.5, 1, 1.5),
    "copy": (1.2, 1.2),
    "random": (4, 1.3, 1.2, 1.3),
}
WIDE = {"scratch", "r2r"}
SHORT = {
    "scratch": "from scratch",
    "alone": "not grown",
    "r2r": "grown, r2r",
    "random": "random",
    "r2r-0.1": "r2r at 10 %",
    "r2r-0.5": "r2r at 50 %",
    "r2r-flops": "cosine over FLOPs",
    "r2r-rewarm": "rises to the cosine",
    "r2r-repeak": "rises to the peak",
    "copy": "copies",
    "copies": "r2r, copies",
    "fade": "faded in",
    "deepen-first": "deeper first",
    "widen-first": "wider first",
}


def panel(axes: Any, compared: Comparison, account: str, what: str) -> None:
    """Lines with one standard deviation, on a logarithmic scale of budgets."""
    shown = in_order(compared, account, what)
    budgets = sorted({budget for line in shown[1:] for budget in line.ends})
    for line in shown:
        x = [budget for budget in line.ends if budgets[0] <= budget <= budgets[-1]]
        y = np.array([line.mean(budget) for budget in x])
        apart = np.array([spread(line.values(budget)) for budget in x])
        colour, dash = COLOURS[COLOUR[line.way]], DASH.get(line.way)
        axes.fill_between(x, y - apart, y + apart, color=colour, alpha=0.1, linewidth=0)
        style, width = (0, dash) if dash else "-", 1.5 if line.way in WIDE else 1.0
        axes.plot(x, y, color=colour, linestyle=style, linewidth=width, label=name_of(line), marker="o", ms=2)
    starts = [line.start for line in shown if line.start and line.way == "r2r"]
    if starts:
        axes.axhline(
            np.mean(list(starts[0].values())), color="#888888", linewidth=0.7, label="the small network that was there"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.set_xlabel("budget, epochs of the big network")
    axes.set_title(f"{VERBS[what]}, {ACCOUNTS[account]}", loc="left")


def sheet(compared: Comparison, figure: Any) -> None:
    """Widening and deepening, in both accounts."""
    compared = fairest(compared)
    grid = figure.subplots(2, 2, sharey="row")
    for row, what in enumerate(("widen", "deepen")):
        for column, account in enumerate(ACCOUNTS):
            if compared.of(account, what):
                panel(grid[row][column], compared, account, what)
        grid[row][0].set_ylabel("final accuracy (%)")
        shown = {label: handle for axes in grid[row] for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        grid[row][1].legend(shown.values(), shown, loc="lower right", fontsize=5.2, labelspacing=0.3, handlelength=1.8)
        grid[row][0].set_ylim(61, 80)


def draw(compared: Comparison, folder: Path) -> list[Path]:
    """The sheet as PNG and PDF."""
    with drawing() as Figure:
        figure = Figure(figsize=(2 * COLUMN, 2 * COLUMN))
        sheet(compared, figure)
        return save(figure, folder, "does-it-pay")


NAMED = {"scratch": "from scratch", "r2r": "grown (r2r)", "random": "random padding"}
HUES = {"scratch": "black", "r2r": "blue", "random": "orange"}


def card_panel(compared: Comparison, account: str, what: str) -> Panel:
    """Four lines of an account: grown, not grown, from scratch, random padding."""
    small, lines = compared.small(account, what), []
    grown = compared.lines[f"{account}-{what}-r2r"]
    budgets = list(grown.ends)
    for line in (compared.scratch, grown, small, compared.lines.get(f"{account}-{what}-random")):
        if line is None:
            continue
        x = [budget for budget in line.ends if budgets[0] <= budget <= budgets[-1]]
        if len(x) < 2:  # no line
            continue
        alone = "trained on" if account == "RE" else "small, alone"
        y, sd = [line.mean(budget) for budget in x], [spread(line.values(budget)) for budget in x]
        dash, width = ("7 2.5 2 2.5" if line.way == "random" else ""), (2.4 if line.way == "r2r" else 1.7)
        lines.append(Series(NAMED.get(line.way, alone), HUES.get(line.way, "grey"), x, y, sd, dash, width))
    title = f"{VERBS[what]}, {ACCOUNTS[account]}"
    return Panel(
        title, "budget in epochs of the big network", "final accuracy, %", lines, budgets, range(64, 81, 4), 62, 80.5, "x"
    )


def draw_page(compared: Comparison, path: Path) -> None:
    """The picture of the documentation: reuse on the left, from nothing on the right."""
    fair = fairest(compared)
    pairs = [(account, what) for what in ("widen", "deepen") for account in ("RE", "EQ")]
    panels = [card_panel(fair, *pair) for pair in pairs if f"{pair[0]}-{pair[1]}-r2r" in fair.lines]
    title = "Final accuracy by budget: grown, not grown, from scratch, random padding; under reuse and from nothing"
    path.write_text(picture(title, panels), encoding="utf-8")


def series(line: Line) -> dict[str, Any]:
    """A line as the report's plots take it: every budget is an entry of its own, over which nothing is smoothed."""
    budgets = list(line.ends)
    return {
        "epochs": budgets,
        "flops": [round(flops(budget) / 1e12, 4) for budget in budgets],
        "mean": [round(line.mean(budget), 3) for budget in budgets],
        "sd": [round(spread(line.values(budget)), 3) for budget in budgets],
        "cuts": list(range(len(budgets))),
        "grown": None,
        "n": len(line.ends[budgets[0]]),
    }


FIRST = ("r2r", "random", "scratch", "alone")  # the lines that a plot opens with


def data(compared: Comparison) -> dict[str, Any]:
    """The plots: for each way both accounts, where it has them. Plots open on reuse with four lines."""
    groups, fair = {}, fairest(compared)
    for what in ("widen", "deepen", "both"):
        ways: dict[str, dict[str, Any]] = {}
        source = fair if fair.of("EQ", what) else compared
        for account, key in (("EQ", "nothing"), ("RE", "reuse")):
            for line in in_order(source, account, what) if source.of(account, what) else ():
                name = "alone" if line.way in ("widen", "deepen") else line.way
                way = ways.setdefault(name, {"nothing": None, "reuse": None, "labels": {}, "way": line.way})
                if account == "EQ" or line.account == "RE":
                    way[key] = series(line)
                way["labels"][key] = name_of(line)
        reuse = any(way["reuse"] for way in ways.values())
        groups[f"pays-{what}"] = {
            "title": f"{VERBS[what]}: accuracy by budget",
            "kind": "budgets",
            "account": "reuse" if reuse else "nothing",
            "first": list(FIRST) if reuse else list(ways),
            "ends": True,
            "arms": [arm(name, **values) for name, values in ways.items()],
        }
    return groups


def opening(compared: Comparison) -> dict[str, Any]:
    """The report's first figure: reuse by widening, three lines."""
    names = {"r2r": "grown", "alone": "trained on", "scratch": "from scratch"}
    arms = [one for one in data(compared).get("pays-widen", {"arms": []})["arms"] if one["name"] in names]
    if len(arms) < len(names) or not all(one["reuse"] or one["both"] for one in arms):
        return {}
    shown = [{**one, "short": names[one["name"]], "width": 1.5} for one in arms]
    plot = {"title": "Reuse by widening", "kind": "budgets", "account": "reuse", "ends": True, "plain": True, "below": 12}
    return {"opening": {**plot, "arms": shown}}


def arm(name: str, way: str, labels: dict[str, str], nothing: Any, reuse: Any) -> dict[str, Any]:
    return {
        "name": name,
        "label": next(iter(labels.values())),
        "labels": labels,
        "short": SHORT.get(name, name),
        "both": name == "scratch",
        "colour": COLOUR[way],
        "dash": list(DASH.get(way, ())),
        "width": 1.3 if way in WIDE else 1.0,
        "nothing": nothing,
        "reuse": reuse,
    }
