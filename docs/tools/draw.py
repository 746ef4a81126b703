"""Draw docs/how-it-works.svg: one small residual network as outgrow sees it, before and after a widening by R2R.

Nothing in the picture is drawn by hand: operators come from the trace, colours from the volumes, numbers from the tensors, and
what is new from the plan of the growth.

    python docs/tools/draw.py [file]
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import dissect
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.trace.operators import Op, refs_in

COLOURS = ("#0072B2", "#D55E00")  # of the volumes that grow
PINNED = "#9a9a9a"
GROUND = "#fdfcf9"  # as the pictures of docs/transforms have
CELL = 0.2
OPERATORS, BEFORE, AFTER = 1.75, 4.55, 8.7  # where the columns begin (operators: their middle)
SAID = {"writes": "written alike", "scales": "scaled alike", "reads": "read with opposite signs"}  # of a pair, by role


class Residual(nn.Module):
    """A stream of four units, and a hidden layer of three beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.fc1 = nn.Linear(4, 3, bias=False)
        self.fc2 = nn.Linear(3, 4, bias=False)
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(x + self.fc2(torch.relu(self.fc1(x))))
        return self.head(x)


def make_model() -> Residual:
    """Trained numbers would look no different; batch norm's vectors are drawn so that they are not all zeros and ones."""
    torch.manual_seed(3)
    model = Residual().eval()
    with torch.no_grad():
        for vector in (model.bn.weight, model.bn.bias, model.bn.running_mean, model.bn.running_var):
            vector.uniform_(0.3, 1.0)
    return model


@dataclass(frozen=True)
class View:
    """A model at one size: its anatomy, its numbers, and which positions of which tensor axes are new."""

    anatomy: Anatomy
    tensors: dict[str, np.ndarray[Any, Any]]
    new: dict[tuple[str, int], dict[int, str]]  # (tensor, axis) → position → what stands there

    def colour(self, name: str, axis: int) -> list[str]:
        """The colour of every index of an axis: that of the volume it belongs to."""
        found = [PINNED] * self.tensors[name].shape[axis]
        for volume, colour in zip(growing(self.anatomy), COLOURS, strict=True):
            for slot in volume.slots:
                if (slot.tensor, slot.axis) == (name, axis):
                    for position in slot.positions:
                        found[position] = colour
        return found

    def roles(self, name: str) -> list[tuple[Volume, str]]:
        """What a tensor does to which volume."""
        growable = growing(self.anatomy)
        found = {(volume.name, slot.role): volume for volume in growable for slot in volume.slots if slot.tensor == name}
        return [(volume, role) for (_, role), volume in found.items()]


def growing(anatomy: Anatomy) -> list[Volume]:
    return [volume for volume in anatomy.volumes if not volume.pinned]


def view(model: nn.Module, example: Tensor, plan: Plan | None = None) -> View:
    tensors = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    new: dict[tuple[str, int], dict[int, str]] = {}
    for edit in plan.edits if plan is not None else ():
        if isinstance(edit, Insertion):
            signs = edit.signs or (1.0,) * len(edit.at)
            named = {at: ("−" if sign < 0 else "+") for at, sign in zip(edit.at, signs, strict=True)}
            new[edit.tensor, edit.axis] = named
    return View(dissect(model, example), tensors, new)


def strip(axes: Axes, x: float, y: float, colours: list[str], vertical: bool, new: dict[int, str], size: float = CELL) -> None:
    """A row of squares, one a unit; new ones are framed in black."""
    thin = 0.42 * size
    for index, colour in enumerate(colours):
        corner = (x, y - (index + 1) * size) if vertical else (x + index * size, y)
        wide, high = (thin, size) if vertical else (size, thin)
        axes.add_patch(Rectangle(corner, wide, high, facecolor=colour, edgecolor="white", linewidth=0.6))
        if index in new:
            axes.add_patch(Rectangle(corner, wide, high, facecolor="none", edgecolor="black", linewidth=1.0, zorder=5))


def matrix(axes: Axes, shown: View, name: str, x: float, middle: float) -> tuple[float, float]:
    """A tensor as coloured cells, its axes' labels beside it; returns its width and height."""
    numbers = shown.tensors[name]
    grid = numbers if numbers.ndim == 2 else numbers[None, :]
    rows, columns = grid.shape
    top = middle + rows * CELL / 2
    limit = float(np.abs(grid).max())
    for row in range(rows):
        for column in range(columns):
            colour = plt.get_cmap("PRGn")(0.5 + 0.42 * grid[row, column] / limit)
            corner = (x + column * CELL, top - (row + 1) * CELL)
            axes.add_patch(Rectangle(corner, CELL, CELL, facecolor=colour, edgecolor="white", linewidth=0.6))
    last = numbers.ndim - 1
    strip(axes, x, top + 0.03, shown.colour(name, last), False, shown.new.get((name, last), {}))
    if numbers.ndim == 2:
        strip(axes, x - 0.42 * CELL - 0.03, top, shown.colour(name, 0), True, shown.new.get((name, 0), {}))
    frame(axes, shown, name, x, top, rows, columns)
    return columns * CELL, rows * CELL


def frame(axes: Axes, shown: View, name: str, x: float, top: float, rows: int, columns: int) -> None:
    """Black frames around what is new, with U, +A and −A beside it."""
    vector = shown.tensors[name].ndim == 1
    style = {"facecolor": "none", "edgecolor": "black", "linewidth": 1.0, "zorder": 6}
    for position, sign in shown.new.get((name, 0 if vector else 1), {}).items():
        axes.add_patch(Rectangle((x + position * CELL, top - rows * CELL), CELL, rows * CELL, **style))
        if not vector:
            text = f"{sign if sign == '−' else ''}A"
            axes.text(x + (position + 0.5) * CELL, top - rows * CELL - 0.04, text, ha="center", va="top", fontsize=7)
    if not vector:
        for position in shown.new.get((name, 0), {}):
            axes.add_patch(Rectangle((x, top - (position + 1) * CELL), columns * CELL, CELL, **style))
            axes.text(x + columns * CELL + 0.04, top - (position + 0.5) * CELL, "U", ha="left", va="center", fontsize=7)


def parameters_of(anatomy: Anatomy, op: Op) -> list[str]:
    """Names of the parameters and buffers that an operator takes, also through a transpose."""
    trace = anatomy.reading.trace
    maker = {output: other for other in trace.ops for output in other.outputs}
    names = []
    for ref in refs_in(op.args):
        value = trace.values[ref.value]
        if not value.name and ref.value in maker and maker[ref.value].name == "aten.t":
            (source,) = refs_in(maker[ref.value].args)
            value = trace.values[source.value]
        if value.name:
            names.append(value.name)
    return names


def draw_operator(axes: Axes, op: Op, y: float) -> None:
    box = FancyBboxPatch((OPERATORS - 0.95, y - 0.17), 1.9, 0.34, boxstyle="round,pad=0.02,rounding_size=0.08")
    box.set(facecolor="#f4f4f4", edgecolor="#555555", linewidth=0.8)
    axes.add_patch(box)
    name = (
        op.name.replace("aten.", "")
        .replace("_native_batch_norm_legit_no_training", "batch_norm")
        .replace("native_batch_norm", "batch_norm")
    )
    axes.text(OPERATORS, y, name, ha="center", va="center", fontsize=8.5, family="monospace")
    axes.text(OPERATORS - 1.06, y, op.module, ha="right", va="center", fontsize=8, color="#555555")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], bend: str = "arc3") -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, connectionstyle=bend, color="#555555", linewidth=1.0)
    )


def labels_of(shown: View, value: int) -> list[str]:
    """The colours of the units that a value carries on its last axis."""
    found: list[str] = []
    for block in shown.anatomy.reading.layouts[value]:
        colours = [PINNED] * len(block.labels)
        for volume, colour in zip(growing(shown.anatomy), COLOURS, strict=True):
            for position, unit in enumerate(shown.anatomy.units(volume, block.labels).tolist()):
                if unit >= 0:
                    colours[position] = colour
        found = colours
    return found


def draw(path: Path) -> None:
    model, example = make_model(), torch.randn(2, 3)
    before = view(copy.deepcopy(model), example)
    growth = outgrow.grow(model, example, outgrow.Widen(("stem", "fc1"), by=2, method="r2r"))
    after = view(model, example, growth.plan)

    trace = before.anatomy.reading.trace
    ops = [op for op in trace.ops if op.name != "aten.t" and refs_in(op.args)]  # transposes are drawn with their weights
    heights = [1.55 if any(before.tensors[n].ndim == 2 for n in parameters_of(before.anatomy, op)) else 0.72 for op in ops]
    bn = next(index for index, op in enumerate(ops) if len(parameters_of(before.anatomy, op)) == 4)
    heights[bn] = 1.75
    total = sum(heights) + 1.5
    figure, axes = plt.subplots(figsize=(11.6, total * 0.82))
    axes.set(xlim=(0, 12.8), ylim=(0, total), aspect="equal")
    axes.axis("off")
    for x, title, below in (
        (OPERATORS - 0.95, "trace", "operators and their units"),
        (BEFORE - 0.1, "before", "cells: values, strips: volumes"),
        (AFTER - 0.1, "after", "R2R, two new units in each volume"),
    ):
        axes.text(x, total - 0.15, title, ha="left", va="top", fontsize=11, weight="bold")
        axes.text(x, total - 0.47, below, ha="left", va="top", fontsize=8.5)

    y = total - 0.95
    axes.text(OPERATORS, y, "input", ha="center", va="center", fontsize=9, style="italic")
    places: dict[int, float] = {}
    inputs = {value.index: y for value in trace.values if value.kind == "input"}
    y -= 0.25
    for op, height in zip(ops, heights, strict=True):
        y -= height / 2
        places[op.index] = y
        y -= height / 2
    made = {output: places[op.index] for op in ops for output in op.outputs} | inputs
    for op in ops:
        here = places[op.index]
        draw_operator(axes, op, here)
        sources = [made[ref.value] for ref in refs_in(op.args) if ref.value in made]
        nearest = min(sources)
        for source in sources:
            if source == nearest:
                arrow(axes, (OPERATORS, source - 0.19), (OPERATORS, here + 0.19))
            else:
                arrow(axes, (OPERATORS + 0.99, source), (OPERATORS + 0.99, here), "arc3,rad=-0.25")
        colours = labels_of(before, op.outputs[0])
        if any(colours):
            strip(axes, OPERATORS + 0.1, here - 0.35, colours, False, {}, size=0.17)
        names = parameters_of(before.anatomy, op)
        stacked = [here + 0.4 * ((len(names) - 1) / 2 - place) for place in range(len(names))]
        for name, middle in zip(names, stacked, strict=True):
            wide, _ = matrix(axes, before, name, BEFORE, middle)
            grown, _ = matrix(axes, after, name, AFTER, middle)
            if len(names) == 1 or name == names[0]:
                said = "\n".join(f"{v.name}: {SAID[role]}" for v, role in after.roles(name))
                axes.text(AFTER + grown + 0.4, middle, said, ha="left", va="center", fontsize=8, linespacing=1.4)
            roles = ", ".join(f"{role} {volume.name}" for volume, role in before.roles(name))
            label = f"{name}\n{roles}" if len(names) == 1 else f"{name}: {roles}"
            axes.text(BEFORE + wide + 0.3, middle, label, ha="left", va="center", fontsize=8, linespacing=1.4)
    end = places[ops[-1].index] - 0.7
    arrow(axes, (OPERATORS, places[ops[-1].index] - 0.19), (OPERATORS, end + 0.12))
    axes.text(OPERATORS, end, "output", ha="center", va="center", fontsize=9, style="italic")
    key = [(c, f"volume “{v.name}”: {v.size} units") for v, c in zip(growing(before.anatomy), COLOURS, strict=True)]
    for index, (colour, text) in enumerate([*key, (PINNED, "pinned: inputs and outputs of the model")]):
        x = BEFORE - 0.1 + 2.65 * index
        axes.add_patch(Rectangle((x, end - 0.08), 0.16, 0.16, facecolor=colour, edgecolor="none"))
        axes.text(x + 0.24, end, text, ha="left", va="center", fontsize=8.5)
    plt.rcParams["svg.hashsalt"] = "outgrow"
    figure.savefig(
        path,
        bbox_inches="tight",
        pad_inches=0.2,
        facecolor=GROUND,
        metadata={"Date": None} if path.suffix == ".svg" else None,
        dpi=130,
    )
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "how-it-works.svg")
