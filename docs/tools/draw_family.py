"""Draw docs/families.svg: the weights of a small family, with a frame around the part that each member computes with.

    python docs/tools/draw_family.py [file]

The card is narrower than those of docs/transforms.md, so that it can be read on a telephone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from ink import CELL, HUES, SOFT, STYLE, Card, Grid, card, grid, save, text
from matplotlib.patches import FancyBboxPatch
from specimens import tenths
from torch import nn

import outgrow

WIDTH, HEIGHT = 4.9, 3.45
KINDS = np.array(["kept", "drawn", "copied"])  # the hues of entries that came with each size
SIZES = (2, 4, 6)
STEP = 0.13  # between the frames of two members


def family() -> outgrow.Family:
    model = tenths(nn.Sequential(nn.Linear(3, SIZES[0], bias=False), nn.ReLU(), nn.Linear(SIZES[0], 2, bias=False)), seed=4)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    return outgrow.Family(model, x, *(outgrow.Widen("0", to=size) for size in SIZES[1:]))


def shown(made: outgrow.Family, name: str) -> Grid:
    """A shared parameter; the hue of an entry says which member was the first to have it."""
    births = outgrow.cohorts(made[-1])[name]
    values = made[-1].get_parameter(name).detach()
    return Grid(values.numpy(), KINDS[births.expand_as(values).numpy()])


def frames(made: Card, x: float, top: float, sizes: list[tuple[int, int]], down: bool) -> None:
    """One frame per member, each around the smaller ones: (rows, columns) of its part. down: it is rows that are added."""
    for number, (rows, columns) in enumerate(sizes):
        gap = 0.09 + STEP * number
        low, wide = (0.0 if grows and number < len(sizes) - 1 else gap for grows in (down, not down))
        corner = x - gap, top - rows * CELL - low
        size = columns * CELL + gap + wide, rows * CELL + gap + low
        shape = FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.04", fill=False)
        shape.set(edgecolor=HUES[KINDS[number]], linewidth=1.4, zorder=5)
        made.axes.add_patch(shape)


def draw(path: Path) -> Path:
    with plt.rc_context(STYLE):
        nested = family()
        made = card(WIDTH, HEIGHT, 'outgrow.Family(model, x, [Widen("0", to=4)], [Widen("0", to=6)])')
        writes, reads = shown(nested, "0.weight"), shown(nested, "2.weight")
        left, right, top = 0.62, 2.45, HEIGHT - 1.0
        grid(made, left, top, writes)
        grid(made, right, top, reads)
        frames(made, left, top, [(size, 3) for size in SIZES], down=True)
        frames(made, right, top, [(2, size) for size in SIZES], down=False)
        for x, columns, said in ((left, 3, "$W$: writes the units"), (right, 6, "$V$: reads them")):
            text(made, x + columns * CELL / 2, top + 0.52, said, fontsize=9, color=SOFT)
        for number, size in enumerate(SIZES):
            low = top - 1.22 - 0.27 * number
            colour = HUES[KINDS[number]]
            text(made, 2.1, low, f"family[{number}]", fontsize=8.5, ha="left", color=colour, family="DejaVu Sans Mono")
            text(made, 2.98, low, f"{size} units, {5 * size} weights", fontsize=8.5, ha="left")
        made.kinds = {"kept", "drawn", "copied"}
        save(made, path, {"kept": "in all members", "drawn": "from family[1] on", "copied": "in family[2]"})
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "families.svg"))
