"""Draw the pictures of docs/transforms.md, one a transform, from growths of small networks.

    python docs/tools/draw_transforms.py [folder]

Here are the widenings; what is done to whole blocks is in draw_blocks.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import draw_blocks
import matplotlib.pyplot as plt
import numpy as np
import torch
from draw_blocks import below, called
from ink import (
    ALARM,
    CELL,
    HUES,
    SOFT,
    STYLE,
    WIDTH,
    Card,
    Grid,
    arrow,
    box,
    caption,
    card,
    line,
    node,
    plain,
    save,
    short,
    text,
)
from specimens import Specimen, grown, inputs, matrix, tenths
from torch import Tensor, nn

import outgrow
from outgrow.growth_plan.plan import Insertion

SIGNS = {1.0: "A", -1.0: "-A"}


def network(between: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Three units between three inputs and two outputs."""
    return tenths(nn.Sequential(nn.Linear(3, 3, bias=False), between(), nn.Linear(3, 2, bias=False)), seed=4)


def sketch(made: Card, x: float, middle: float, writes: Grid, reads: Grid) -> None:
    """Units as circles and weights as lines; weights that are zero are dotted."""
    step, columns = 0.34, (x, x + 0.66, x + 1.32)
    sizes = (writes.size[1], writes.size[0], reads.size[0])
    places = [
        [(left, middle + step * ((count - 1) / 2 - index)) for index in range(count)]
        for left, count in zip(columns, sizes, strict=True)
    ]
    styles = {kind: {"color": hue, "linewidth": 1.0} for kind, hue in HUES.items()}
    styles |= {"kept": {"color": "#a9bdd6", "linewidth": 0.8}, "zero": {"color": "#a09b92", "linestyle": (0, (1, 2))}}
    for weights, starts, ends in ((writes, places[0], places[1]), (reads, places[1], places[2])):
        for (row, column), kind in np.ndenumerate(weights.kinds):
            line(made, [starts[column], ends[row]], **styles[str(kind)])
    for index, spots in enumerate(places):
        for unit, spot in enumerate(spots):
            kind = str(writes.kinds[unit, 0]) if index == 1 else "plain"
            node(made, *spot, kind="plain" if kind == "zero" else kind)
    for left, name in zip(columns, ("x", r"h=\sigma(Wx)", "y=Vh"), strict=True):
        text(made, left, middle - 0.97, f"${name}$", fontsize=8.5, color=SOFT)


def change(
    made: Card,
    x: float,
    middle: float,
    specimen: Specimen,
    tensor: str,
    title: str,
    names: Sequence[str] = (),
    gap: float = 0.3,
) -> float:
    """A tensor before and after; new rows or columns have names, "" for none. Returns where the next picture can begin."""
    was, now = specimen.before(tensor), specimen.after(tensor)
    caption(made, x, middle, was, f"${title}$")
    x += was.size[1] * CELL
    arrow(made, (x + 0.1, middle), (x + 0.31, middle))
    caption(made, x + 0.41, middle, now, rf"$\bar{{{title}}}$")
    rows, columns = now.size
    for index, name in enumerate(names):
        if len(names) == rows and rows != was.size[0]:
            spot = x + 0.41 + columns * CELL + 0.09, middle + (rows / 2 - index - 0.5) * CELL
            text(made, *spot, name, ha="left", fontsize=8.5)
        else:
            text(made, x + 0.41 + (index + 0.5) * CELL, middle - rows * CELL / 2 - 0.16, name, fontsize=8.5)
    return x + 0.41 + columns * CELL + gap


def results(made: Card, specimen: Specimen, x: float, middle: float) -> None:
    """The outputs on one input, before and after."""
    one, other = (plain(numbers[0][:, None]) for numbers in specimen.outputs)
    same = np.allclose(one.numbers, other.numbers, atol=1e-9)
    caption(made, x, middle, one, "$y$")
    text(made, x + CELL + 0.14, middle, "=" if same else "≠", fontsize=11, color=SOFT if same else ALARM)
    caption(made, x + CELL + 0.28, middle, other, r"$\bar{y}$")


def widening(made: Card, specimen: Specimen, middle: float, rows: Sequence[str], columns: Sequence[str]) -> None:
    """A sketch, both matrices before and after, and the outputs."""
    sketch(made, 0.36, middle, specimen.after("0.weight"), specimen.after("2.weight"))
    x = change(made, 2.2, middle, specimen, "0.weight", "W", rows, gap=0.48)
    results(made, specimen, change(made, x, middle, specimen, "2.weight", "V", columns), middle)


def inserted(specimen: Specimen, tensor: str) -> Insertion:
    (edit,) = (edit for edit in specimen.plan.edits if edit.tensor == tensor and isinstance(edit, Insertion))
    return edit


def named(specimen: Specimen, tensor: str, names: Sequence[str]) -> list[str]:
    """Names for the new positions of a tensor, and none for the old."""
    edit = inserted(specimen, tensor)
    given = dict(zip(edit.at, names, strict=True))
    return [f"${given[position]}$" if position in given else "" for position in range(edit.new_size)]


def r2r(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "widen", "0", by=2, method="r2r")
    made = card(WIDTH, 2.75, specimen.call)
    signs = [SIGNS[sign] for sign in inserted(specimen, "2.weight").signs]
    widening(made, specimen, 1.35, named(specimen, "0.weight", ["U", "U"]), named(specimen, "2.weight", signs))
    save(made, path)


def net2net(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "widen", "0", by=2, method=outgrow.Net2Net(split="random"))
    made = card(WIDTH, 2.75, specimen.call)
    copies, reads = inserted(specimen, "0.weight"), inserted(specimen, "2.weight")
    rows = named(specimen, "0.weight", [f"W_{source + 1}" for source in copies.sources])
    widening(made, specimen, 1.35, rows, [short(share) for share in (*reads.keep, *reads.signs)])
    text(made, 5.97, 0.91, "shares", ha="right", fontsize=7.5, color=SOFT)
    save(made, path)


def netmorph(path: Path) -> None:
    """With GELU: units whose rows are zero would never leave it behind a ReLU."""
    readers = grown(network(nn.GELU), inputs(5, 3), "widen", "0", by=2, method="netmorph")
    writers = grown(network(nn.GELU), inputs(5, 3), "widen", "0", by=2, method=outgrow.NetMorph(zero="writers"))
    made = card(WIDTH, 5.05, readers.call)
    text(made, 0.22, 2.43, writers.call, family="DejaVu Sans Mono", fontsize=7.5, ha="left", color=SOFT)
    widening(made, readers, 3.65, named(readers, "0.weight", ["U", "U"]), named(readers, "2.weight", ["0", "0"]))
    widening(made, writers, 1.33, named(writers, "0.weight", ["0", "0"]), named(writers, "2.weight", ["A", "A"]))
    save(made, path)


def random(path: Path) -> None:
    specimen = grown(network(), inputs(5, 3), "widen", "0", by=2, method="random")
    made = card(WIDTH, 2.75, specimen.call)
    widening(made, specimen, 1.35, named(specimen, "0.weight", ["U", "U"]), named(specimen, "2.weight", ["A", "A"]))
    save(made, path)


def mean(path: Path) -> None:
    """Above the parameters, below what goes through the network."""
    norm = tenths(nn.Sequential(nn.Linear(3, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 2, bias=False)), seed=27)
    specimen = grown(norm, inputs(5, 3), "widen", "0", by=2, method="mean")
    made = card(WIDTH, 4.45, specimen.call)
    (epsilon,) = (setting for setting in specimen.plan.settings if setting.name == "eps")
    x, middle = 0.36, 3.05
    x = change(made, x, middle, specimen, "0.weight", "W", named(specimen, "0.weight", ["m", "m"]), gap=0.5)
    x = change(made, x, middle, specimen, "1.weight", r"\gamma", gap=0.42)
    x = change(made, x, middle, specimen, "1.bias", r"\beta", gap=0.45)
    change(made, x, middle, specimen, "2.weight", "V", named(specimen, "2.weight", ["A", "A"]))
    said = rf"$\varepsilon$: {epsilon.old:g} → {epsilon.new:g}".replace("e-0", "e−")
    text(made, 3.42, middle - 0.92, said, fontsize=8, color=SOFT)
    with torch.no_grad():
        values = [[matrix(part(inputs(5, 3))[0].numpy()) for part in (m[:1], m[:2])] for m in (specimen.old, specimen.new)]
    x, middle = 0.92, 1.2
    for title, was, now in zip(("h=Wx", r"\mathrm{norm}(h)"), *values, strict=True):
        caption(made, x, middle, plain(was), f"${title}$")
        arrow(made, (x + CELL + 0.1, middle), (x + CELL + 0.31, middle))
        now[np.abs(now) < 1e-12] = 0  # the rounding of the mean
        caption(made, x + CELL + 0.41, middle, plain(now), "")
        x = 2.95
    text(made, 1.99, middle - 0.42, "the mean\nof the others", ha="left", fontsize=7.5, color=SOFT)
    text(made, 4.02, middle - 0.42, "zero behind\nthe norm", ha="left", fontsize=7.5, color=SOFT)
    results(made, specimen, 6.6, middle)
    save(made, path, {"copied": "new, mean of the old ones"})


class Residual(nn.Module):
    """A stream of three units that a stem writes and a branch adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)
        self.up, self.down = nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        result: Tensor = self.head(x + self.down(torch.relu(self.up(x))))
        return result


def fold(path: Path) -> None:
    specimen = grown(tenths(Residual(), seed=4), inputs(5, 3), "widen", "stem", by=2, residual="fold")
    made = card(WIDTH, 3.9, specimen.call)
    new, y = specimen.new, 2.75
    text(made, 0.7, y, "$z$", fontsize=9)
    places = {"stem": 1.45, "up": 3.3, "ReLU": 4.35, "down": 5.4, "head": 7.4}
    end = 0.8
    for name, middle in places.items():
        if name == "head":
            node(made, 6.35, y, "+")
            arrow(made, (end, y), (6.25, y))
            end = 6.45
        arrow(made, (end, y), (middle - 0.4, y))
        said = name if name == "ReLU" else f"{name}\n{called(getattr(new, name)).splitlines()[1]}"
        box(made, middle, y, said, wide=0.8)
        end = middle + 0.4
    arrow(made, (end, y), (end + 0.26, y))
    text(made, end + 0.36, y, "$y$", fontsize=9)
    text(made, 2.1, y + 0.13, r"$\bar{x}$", fontsize=9)
    line(made, [(2.4, y), (2.4, y + 0.5)])
    arrow(made, (2.4, y + 0.5), (3.9, y + 0.5))
    box(made, 4.35, y + 0.5, "Fold  $r$", "set", wide=0.9, high=0.28)
    line(made, [(4.8, y + 0.5), (6.35, y + 0.5)])
    arrow(made, (6.35, y + 0.5), (6.35, y + 0.1))
    with torch.no_grad():
        matrix = new.fold1(torch.eye(5, dtype=torch.float64)).T.numpy()
        wide = new.stem(inputs(5, 3))[:1]
        narrow = new.fold1(wide)
        assert torch.allclose(narrow, specimen.old.stem(inputs(5, 3))[:1])
    middle = 1.25
    below(made, 1.45, middle, specimen.after("stem.weight"), "$\\bar{W}$", CELL)
    below(made, 3.3, middle, specimen.after("up.weight"), "$\\bar{V}$", CELL)
    for index, (row, column) in enumerate((("U", "A"), ("U", "-A"))):
        text(made, 1.45 + 1.5 * CELL + 0.09, middle - (index + 1) * CELL, f"${row}$", ha="left", fontsize=8.5)
        text(made, 3.3 + (index + 1) * CELL, middle - 2 * CELL - 0.16, f"${column}$", fontsize=8.5)
    below(made, 5.4, middle, Grid(matrix, np.where(matrix == 0, "zero", "set")), "$r$", CELL)
    text(made, 6.37, middle, "·", fontsize=12)
    below(made, 6.68, middle, plain(wide.numpy().T), r"$\bar{x}$", CELL)
    text(made, 7.02, middle, "=", fontsize=11, color=SOFT)
    below(made, 7.36, middle, plain(narrow.numpy().T), "$x$", CELL)
    save(made, path, {"set": "of the Fold, no parameters"})


def fade_units(path: Path) -> None:
    """Random padding whose new columns come in step by step: the numbers are those of a real padding, the steps are not run."""
    specimen = grown(network(), inputs(5, 3), "widen", "0", by=2, method="random")
    made = card(WIDTH, 2.75, 'outgrow.widen(model, x, "0", by=2, fade=steps)')
    writes, reads = specimen.after("0.weight"), specimen.after("2.weight")
    closed = Grid(np.where(reads.kinds == "drawn", 0, reads.numbers), np.where(reads.kinds == "drawn", "zero", reads.kinds))
    half = Grid(np.where(reads.kinds == "drawn", reads.numbers / 2, reads.numbers), reads.kinds)
    sketch(made, 0.36, 1.35, writes, closed)
    caption(made, 2.2, 1.35, writes, r"$\bar{W}$")
    for row in (3, 4):
        text(made, 2.2 + 3 * CELL + 0.09, 1.35 + (2 - row) * CELL, "$U$", ha="left", fontsize=8.5)
    x = 3.55
    for shown, said, level in ((closed, "step 0", "0"), (half, "half-way", r"\frac{1}{2}A"), (reads, "at the end", "A")):
        caption(made, x, 1.35, shown, r"$\bar{V}$")
        for column in (3, 4):
            text(made, x + (column + 0.5) * CELL, 1.35 - CELL - 0.18, f"${level}$", fontsize=8.5)
        text(made, x + 1.5 * CELL, 1.35 - CELL - 0.18, said, fontsize=7.5, color=SOFT)
        if shown is not reads:
            arrow(made, (x + 5 * CELL + 0.1, 1.35), (x + 5 * CELL + 0.31, 1.35))
        x += 5 * CELL + 0.41
    text(made, 6.0, 0.62, "plus what each value has learned meanwhile", fontsize=7.5, color=SOFT)
    save(made, path)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "r2r": r2r,
    "net2net": net2net,
    "netmorph": netmorph,
    "mean": mean,
    "fold": fold,
    "random": random,
    "fade-units": fade_units,
    **draw_blocks.DRAWINGS,
}


def draw(name: str, folder: Path, ending: str = "svg") -> Path:
    """Draw one of the pictures; its file."""
    path = folder / f"{name}.{ending}"
    with plt.rc_context(STYLE):
        DRAWINGS[name](path)
    return path


if __name__ == "__main__":
    into = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "transforms"
    into.mkdir(exist_ok=True)
    for each in DRAWINGS:
        draw(each, into)
