"""What the pictures of docs/transforms.md are drawn with: cards, grids of numbers, boxes and arrows.

A card is a figure in inches with a light ground of its own, so that it reads on a dark page too. The hue of a cell shows where
its number comes from, its depth how large it is; zeros are hollow.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.textpath import TextPath

GROUND, EDGE, INK, SOFT, ALARM = "#fdfcf9", "#d8d3c8", "#262626", "#6b675f", "#b3261e"
HUES = {"kept": "#4a78ad", "changed": "#4a78ad", "drawn": "#ee8a1d", "copied": "#2f9b74", "set": "#7d62ad", "plain": "#8b8680"}
LEGEND = {
    "kept": "existing value, kept",
    "changed": "existing value, changed",
    "drawn": "new, drawn",
    "copied": "new, from existing values",
    "set": "new, one",
    "zero": "zero",
}
CELL, WIDTH = 0.28, 8.8
STYLE = {
    "svg.hashsalt": "outgrow",
    "font.family": "DejaVu Sans",
    "mathtext.fontset": "stix",
    "path.simplify": False,
}
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Grid:
    """Numbers, and where each of them comes from: a key of LEGEND, or "plain"."""

    numbers: Numbers
    kinds: Numbers

    @property
    def size(self) -> tuple[int, int]:
        rows, columns = self.numbers.shape
        return rows, columns


def plain(numbers: Numbers) -> Grid:
    """Numbers that are no parameters: zeros are still hollow."""
    return Grid(numbers, np.where(numbers == 0, "zero", "plain"))


@dataclass
class Card:
    """A picture under way."""

    axes: Axes
    width: float
    height: float
    kinds: set[str] = field(default_factory=set)  # that were drawn, for the legend


def card(width: float, height: float, call: str) -> Card:
    """An empty card with the call that it shows in its first line."""
    figure = plt.figure(figsize=(width, height))
    figure.patch.set_alpha(0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    ground = FancyBboxPatch((0.03, 0.03), width - 0.06, height - 0.06, boxstyle="round,pad=0,rounding_size=0.1")
    ground.set(facecolor=GROUND, edgecolor=EDGE, linewidth=1, zorder=0)
    axes.add_patch(ground)
    made = Card(axes, width, height)
    text(made, 0.22, height - 0.24, call, family="DejaVu Sans Mono", fontsize=7.5, ha="left", color=SOFT)
    return made


def save(made: Card, path: Path, legend: dict[str, str] | None = None) -> None:
    """Write the card with a legend of what is on it; the file depends on nothing but its content."""
    entries = [(kind, said) for kind, said in (LEGEND | (legend or {})).items() if kind in made.kinds]
    widths = [TextPath((0, 0), said, size=7).get_extents().width / 72 + 0.4 for _, said in entries]
    x = made.width - sum(widths)
    for (kind, said), wide in zip(entries, widths, strict=True):
        cell(made, x, 0.16, 0.14, kind, 0.6)
        text(made, x + 0.2, 0.225, said, fontsize=7, ha="left", color=SOFT)
        x += wide
    if path.suffix == ".svg":
        written = io.StringIO()
        made.axes.figure.savefig(written, format="svg", metadata={"Date": None, "Title": path.stem})
        path.write_text(light(written.getvalue()), encoding="utf-8")
    else:
        made.axes.figure.savefig(path, dpi=160)
    plt.close(made.axes.figure)


def light(svg: str) -> str:
    """An SVG of matplotlib's at half its size: words are kept once and used again, coordinates end at a tenth of a point."""
    svg = re.sub(r"<!--.*?-->|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text)_\d+"| clip-path="[^"]*"|; stroke-linejoin: miter', "", svg)
    svg = re.sub(r"scale\([^)]*\)|(?<![\w.])-?\d+\.\d{2,}", lambda m: m[0] if m[0][0] == "s" else f"{float(m[0]):.1f}", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r"(?<=[\dz])\n(?=[LQCMz\"])|(?<=[LQCM]) (?=[-\d])", "", svg)
    svg = re.sub(r"<g>\n(<(?:path|use) [^>]*/>)\n</g>", r"\1", svg)
    svg = re.sub(r'transform="translate\((\S+) 0\)"', r'x="\1"', svg)
    svg = re.sub(r'(<path d="[^"]*)(" style="[^"]*"/>)(?:\n<path d="[^"]*\2)+', _together, svg)
    svg = svg.replace(f' style="fill: {INK}"', "").replace("<svg ", f'<svg fill="{INK}" ', 1)
    glyphs = re.findall(r'<path id="[^>]*/>', svg)
    svg = re.sub(r'<defs>\n(?:<path id="[^>]*/>\n)+</defs>\n', "", svg)
    words = dict.fromkeys(re.findall(r"(?<=>\n)(?:<use [^>]*/>\n)+(?=</g>)", svg))
    once = [word for word in words if svg.count(f">\n{word}</g>") > 1]
    for number, word in enumerate(once):
        svg = re.sub(rf"<g ([^>]*)>\n{re.escape(word)}</g>", rf'<use xlink:href="#w{number}" \1/>', svg)
    kept = [f'<g id="w{number}">\n{word}</g>' for number, word in enumerate(once)]
    svg = svg.replace("<defs>\n", "\n".join(["<defs>", *glyphs, *kept, ""]), 1)
    for number, name in enumerate(re.findall(r'<path id="([^"]*)"', svg)):
        svg = re.sub(rf'(?<=["#]){re.escape(name)}(?=")', f"g{number}", svg)
    return svg.replace("xlink:href", "href")


def _together(alike: re.Match[str]) -> str:
    """Paths of one style, one after the other, as one path."""
    return alike[1] + "".join(re.findall(r'd="([^"]*)"', alike[0])[1:]) + alike[2]


def text(made: Card, x: float, y: float, said: str, **style: Any) -> None:
    usual = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "zorder": 6}
    made.axes.text(x, y, said, **usual | style)


def tint(kind: str, depth: float) -> str:
    """The hue of a kind, from nearly white (0) to full (1)."""
    if kind == "zero":
        return "white"
    hue, ground = np.array(to_rgb(HUES[kind])), np.ones(3)
    return to_hex(ground + (0.12 + 0.5 * depth) * (hue - ground))


def cell(made: Card, x: float, y: float, size: float, kind: str, depth: float) -> None:
    """A square with its lower left corner at (x, y)."""
    made.kinds.add(kind)
    gap = 0.004
    square = Rectangle((x + gap, y + gap), size - 2 * gap, size - 2 * gap, linewidth=0, facecolor=tint(kind, depth))
    if kind == "zero":
        square = Rectangle((x, y), size, size, linewidth=0.7, facecolor="white", edgecolor="#b9b4aa")
    made.axes.add_patch(square)
    if kind == "changed":
        inner = Rectangle((x + 0.07 * size, y + 0.07 * size), 0.86 * size, 0.86 * size, fill=False)
        inner.set(edgecolor=HUES[kind], linewidth=0.8, linestyle=(0, (2, 1.4)))
        made.axes.add_patch(inner)


def short(number: float) -> str:
    """Two decimals, without zeros that say nothing."""
    said = f"{abs(number):.2f}".rstrip("0").rstrip(".")
    said = said[1:] if said.startswith("0.") else said
    return f"−{said}" if number < 0 and said != "0" else said


def grid(made: Card, x: float, top: float, shown: Grid, size: float = CELL, numbers: bool = True) -> None:
    """A matrix with its upper left corner at (x, top); without printed values, a bar marks those below zero."""
    rows, columns = shown.size
    most = float(np.abs(shown.numbers).max()) or 1.0
    for row in range(rows):
        for column in range(columns):
            number, kind = float(shown.numbers[row, column]), str(shown.kinds[row, column])
            left, low = x + column * size, top - (row + 1) * size
            cell(made, left, low, size, kind, abs(number) / most)
            if not numbers and number < 0:
                line(
                    made,
                    [(left + 0.3 * size, low + size / 2), (left + 0.7 * size, low + size / 2)],
                    color=INK,
                    linewidth=0.6,
                    zorder=4,
                )
            if numbers:
                said = short(number)
                colour = "#a09b92" if kind == "zero" else INK
                text(made, left + size / 2, low + size / 2 - 0.005, said, fontsize=min(22, 90 / len(said)) * size, color=colour)
    bracket(made, x, top, columns * size, rows * size)


def bracket(made: Card, x: float, top: float, wide: float, high: float) -> None:
    """The brackets of a matrix."""
    for side, turn in ((x - 0.04, 1), (x + wide + 0.04, -1)):
        xs = [side + 0.05 * turn, side, side, side + 0.05 * turn]
        ys = [top + 0.03, top + 0.03, top - high - 0.03, top - high - 0.03]
        made.axes.plot(xs, ys, color=INK, linewidth=0.8, solid_capstyle="butt", zorder=4)


def caption(made: Card, x: float, middle: float, shown: Grid, said: str, size: float = CELL, numbers: bool = True) -> None:
    """A matrix with its left edge at x, centred on a height, and its name above it."""
    rows, columns = shown.size
    grid(made, x, middle + rows * size / 2, shown, size, numbers)
    text(made, x + columns * size / 2, middle + rows * size / 2 + 0.17, said, fontsize=9.5)


def arrow(made: Card, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    usual = {"arrowstyle": "-|>", "mutation_scale": 7, "color": SOFT, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0, "zorder": 2}
    made.axes.add_patch(FancyArrowPatch(start, end, **usual | style))


def line(made: Card, points: Sequence[tuple[float, float]], **style: Any) -> None:
    usual = {"color": SOFT, "linewidth": 0.9, "zorder": 2, "solid_joinstyle": "round"}
    made.axes.plot(*zip(*points, strict=True), **usual | style)


def skip(made: Card, start: tuple[float, float], end: tuple[float, float], height: float) -> None:
    """Up from the start, across and down to the end."""
    line(made, [start, (start[0], height), (end[0], height)])
    arrow(made, (end[0], height), end)


def frame(made: Card, *corners: tuple[float, float]) -> None:
    """Two thin lines from the corners of a box down to those of what it holds."""
    for start, end in (corners[:2], corners[2:]):
        line(made, [start, end], linewidth=0.6, linestyle=(0, (3, 2)), color="#b9b4aa", zorder=1)
    line(made, [corners[1], corners[3]], linewidth=0.6, linestyle=(0, (3, 2)), color="#b9b4aa", zorder=1)


def box(made: Card, x: float, y: float, said: str, kind: str = "kept", wide: float = 0.86, high: float = 0.34) -> None:
    """A module, around its middle (x, y)."""
    shape = FancyBboxPatch((x - wide / 2, y - high / 2), wide, high, boxstyle="round,pad=0,rounding_size=0.06")
    shape.set(facecolor=tint(kind, 0.15), edgecolor=HUES[kind], linewidth=0.9, zorder=3)
    made.axes.add_patch(shape)
    text(made, x, y - 0.005, said, fontsize=7.2, linespacing=1.25)


def node(made: Card, x: float, y: float, said: str = "", kind: str = "plain", radius: float = 0.1) -> None:
    """A circle: a unit, a sum or a gate."""
    face, edge = ("white", SOFT) if kind == "plain" else (tint(kind, 0.5), HUES[kind])
    style = {
        "marker": "o",
        "markersize": 144 * radius,
        "markerfacecolor": face,
        "markeredgecolor": edge,
        "markeredgewidth": 0.9,
    }
    made.axes.plot([x], [y], linestyle="none", zorder=5, **style)
    if said:
        text(made, x, y - 0.005, said, fontsize=9)


def curves(
    made: Card, x: float, y: float, size: tuple[float, float], shown: Sequence[tuple[Numbers, Numbers, dict[str, Any]]]
) -> tuple[float, float, float, float]:
    """Curves in a field with its lower left corner at (x, y), all on one scale; returns what maps numbers to places."""
    xs, ys = (np.concatenate([curve[axis] for curve in shown]) for axis in (0, 1))
    left, low = float(xs.min()), float(ys.min())
    wide, high = size[0] / (float(xs.max()) - left), size[1] / (float(ys.max()) - low)
    across, up = x + (0 - left) * wide, y + (0 - low) * high
    line(made, [(across, y), (across, y + size[1])], linewidth=0.7)
    line(made, [(x, up), (x + size[0], up)], linewidth=0.7)
    for across, up, style in shown:
        points = list(zip(x + (across - left) * wide, y + (up - low) * high, strict=True))
        line(made, points, **{"linewidth": 1.2, "zorder": 4} | style)
    return left, low, wide, high
