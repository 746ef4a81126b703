"""Line charts as SVG files for the documentation: a light card like the pictures of docs/transforms, lines named at their ends.

Text stays text, so that files are small and sharp, and the same data give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = {
    "blue": "#3f6da3",
    "orange": "#c4650a",
    "green": "#24805f",
    "purple": "#7d62ad",
    "grey": "#7a756e",
    "black": "#262626",
}
STYLE = (
    ".card{fill:#fdfcf9;stroke:#d8d3c8}.grid{stroke:#e4dfd5;stroke-width:1}.hair{stroke:#b9b4aa;stroke-width:.8}"
    "text{font:12px system-ui,sans-serif;fill:#262626}.soft{fill:#6b675f}.head{font-size:14px;font-weight:600}"
    ".end{text-anchor:end}.middle{text-anchor:middle}.line{fill:none;stroke-linejoin:round}"
)
WIDE, HIGH, TOP, LEFT, FOOT = 440, 300, 62, 46, 48


@dataclass(frozen=True)
class Series:
    """One line; `spread` is half the height of its band, empty for none."""

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    dash: str = ""
    width: float = 2.0


@dataclass(frozen=True)
class Panel:
    """A pair of axes. `log` names the axes with a logarithmic scale; lines that leave `low` to `high` are cut off there."""

    title: str
    across: str
    up: str
    series: Sequence[Series]
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    low: float
    high: float
    log: str = ""
    level: tuple[float, str] | None = None  # a thin horizontal line with its name


def picture(title: str, panels: Sequence[Panel], columns: int = 2) -> str:
    """The whole file; a card with panels side by side, and rows of them."""
    rows = -(-len(panels) // columns)
    width, height = WIDE * min(columns, len(panels)) + 24, HIGH * rows + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for number, panel in enumerate(panels):
        parts += draw(panel, 12 + WIDE * (number % columns), 12 + HIGH * (number // columns), number)
    return "\n".join([*parts, "</svg>", ""])


def draw(panel: Panel, x0: float, y0: float, number: int) -> list[str]:
    margin = 20 + 6.6 * max(len(one.label) for one in panel.series)
    left, right, top, bottom = x0 + LEFT, x0 + WIDE - margin, y0 + TOP, y0 + HIGH - FOOT
    first, last = panel.x_ticks[0], panel.x_ticks[-1]

    def scaled(value: float, axis: str) -> float:
        return math.log2(value) if axis in panel.log else value

    def x(value: float) -> float:
        low, high = scaled(first, "x"), scaled(last, "x")
        return left + (scaled(value, "x") - low) / (high - low) * (right - left)

    def y(value: float) -> float:
        low, high = scaled(panel.low, "y"), scaled(panel.high, "y")
        return bottom - (scaled(max(value, panel.low / 2) if "y" in panel.log else value, "y") - low) / (high - low) * (
            bottom - top
        )

    parts = [
        f'<text class="head" x="{x0 + 10:g}" y="{y0 + 22:g}">{escape(panel.title)}</text>',
        f'<text class="soft" x="{x0 + 10:g}" y="{y0 + 42:g}">{escape(panel.up)}</text>',
        f'<text class="soft end" x="{right:.1f}" y="{bottom + 36:g}">{escape(panel.across)}</text>',
        f'<clipPath id="c{number}"><rect x="{left:g}" y="{top:g}" width="{right - left + 4:.1f}" height="{bottom - top:g}"/>'
        "</clipPath>",
    ]
    for tick in panel.y_ticks:
        parts.append(f'<path class="grid" d="M{left:g} {y(tick):.1f}H{right:.1f}"/>')
        parts.append(f'<text class="soft end" x="{left - 7:g}" y="{y(tick) + 4:.1f}">{tick:g}</text>')
    parts += [
        f'<text class="soft middle" x="{x(tick):.1f}" y="{bottom + 18:g}">{f"{tick:g}".replace("-", "−")}</text>'
        for tick in panel.x_ticks
    ]
    if panel.level is not None:
        value, name = panel.level
        parts.append(f'<path class="hair" stroke-dasharray="2 3" d="M{left:g} {y(value):.1f}H{right:.1f}"/>')
        parts.append(f'<text class="soft end" x="{right - 2:.1f}" y="{y(value) + 15:.1f}">{escape(name)}</text>')
    parts.append(f'<g clip-path="url(#c{number})">')
    for one in reversed(panel.series):
        colour, points = COLOURS[one.colour], list(zip(one.x, one.y, strict=True))
        if one.spread:
            above = [(a, b + c) for (a, b), c in zip(points, one.spread, strict=True)]
            below = [(a, b - c) for (a, b), c in zip(points, one.spread, strict=True)][::-1]
            parts.append(f'<path fill="{colour}" opacity=".13" d="M{path([*above, *below], x, y)}Z"/>')
    for one in reversed(panel.series):
        dash = f' stroke-dasharray="{one.dash}"' if one.dash else ""
        points = list(zip(one.x, one.y, strict=True))
        stroke = f'stroke="{COLOURS[one.colour]}" stroke-width="{one.width:g}"'
        parts.append(f'<path class="line" {stroke}{dash} d="M{path(points, x, y)}"/>')
    parts.append("</g>")
    ends = [min(bottom, max(top, y(one.y[-1]))) for one in panel.series]
    for one, end, at in zip(panel.series, ends, apart(ends, 16, bottom), strict=True):
        parts.append(f'<path class="hair" d="M{x(one.x[-1]) + 3:.1f} {end:.1f}L{right + 9:.1f} {at:.1f}"/>')
        parts.append(
            f'<text x="{right + 12:.1f}" y="{at + 4:.1f}" style="fill:{COLOURS[one.colour]}">{escape(one.label)}</text>'
        )
    return parts


def path(points: Sequence[tuple[float, float]], x: object, y: object) -> str:
    assert callable(x)
    assert callable(y)
    return "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)


def apart(places: Sequence[float], gap: float, limit: float) -> list[float]:
    """Places moved down, and up again at the limit, until neighbours are `gap` apart; their order is kept."""
    order = sorted(range(len(places)), key=lambda number: places[number])
    moved = [places[number] for number in order]
    for number in range(1, len(moved)):
        moved[number] = max(moved[number], moved[number - 1] + gap)
    for number in reversed(range(len(moved))):
        moved[number] = min(moved[number], limit if number == len(moved) - 1 else moved[number + 1] - gap)
    back = dict(zip(order, moved, strict=True))
    return [back[number] for number in range(len(places))]
