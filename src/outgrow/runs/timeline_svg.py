"""A timeline as an SVG picture: parameters and FLOPs as steps over the stages of a run.

Both are drawn relative to the start, on one logarithmic axis. The picture has a light background, so that it is readable on a
dark page too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Protocol

from outgrow.text.plurals import counted
from outgrow.text.tables import rounded

GROUND, EDGE, INK, SOFT = "#fdfcf9", "#d8d3c8", "#262626", "#6b675f"
HUES = {"parameters": "#4a78ad", "FLOPs": "#c4650a"}
LEFT, TOP, COLUMN, HEIGHT, LINE = 64, 56, 190, 200, 16  # in pixels
LETTERS = 29  # per line of a column
APART = {"parameters": 1.75, "FLOPs": -1.75}  # half the distance of two lines with equal values, so that neither is hidden


class Drawn(Protocol):
    """The attributes of a stage that are drawn."""

    @property
    def when(self) -> str: ...
    @property
    def sizes(self) -> str: ...
    @property
    def parameters(self) -> int: ...
    @property
    def flops(self) -> int: ...


def draw(stages: Sequence[Drawn]) -> str:
    """The picture as SVG text."""
    amounts = {"parameters": [stage.parameters for stage in stages], "FLOPs": [stage.flops for stage in stages]}
    ratios = {name: [number / max(numbers[0], 1) for number in numbers] for name, numbers in amounts.items()}
    most = max(2.0, *(max(of) for of in ratios.values()))
    notes = [
        _wrapped(stage.when, "bold") + [line for size in stage.sizes.split(", ") for line in _wrapped(size)] for stage in stages
    ]
    width = LEFT + COLUMN * len(stages) + 24
    height = TOP + HEIGHT + 36 + LINE * max(map(len, notes)) + 16
    parts = [f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>']
    for index, name in enumerate(HUES):
        x = LEFT + 120 * index
        parts.append(f'<path class="{name}" d="M{x} 24h22"/>{_text(x + 30, 28, name, "small")}')
    for tick in _ticks(most):
        y = _height(tick, most)
        parts.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}H{width - 24}"/>{_text(LEFT - 10, y + 4, f"× {tick:g}", "small end")}'
        )
    for name in HUES:
        moved, ends = APART[name], range(LEFT + COLUMN, LEFT + COLUMN * len(stages) + 1, COLUMN)
        turns = [end + moved if end < ends[-1] else end for end in ends]
        steps = [f"{'M' if not i else 'V'}{'' if i else f'{LEFT} '}{_height(ratio, most) + moved:.1f}H{turn:g}"
                 for i, (ratio, turn) in enumerate(zip(ratios[name], turns, strict=True))]  # fmt: skip
        parts.append(f'<path class="{name}" d="{"".join(steps)}"/>')
    for index, note in enumerate(notes):
        middle = LEFT + COLUMN * (index + 0.5)
        upper = max(reversed(HUES), key=lambda name: ratios[name][index])  # its label is above its line, the other label below
        for name in HUES:
            y = _height(ratios[name][index], most) + (-9 if name == upper else 19)
            parts.append(_text(middle, y, rounded(amounts[name][index]), f"small middle {name}"))
        for line, (text, style) in enumerate(note):
            parts.append(_text(LEFT + COLUMN * index + 6, TOP + HEIGHT + 36 + LINE * line, text, style))
    title = f"{counted(len(stages), 'stage')}: parameters and FLOPs relative to the start"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f"<title>{title}</title>",
            f"<style>{_style()}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _style() -> str:
    lines = "".join(
        f"path.{name}{{stroke:{hue};stroke-width:2.5;fill:none}}text.{name}{{fill:{hue}}}" for name, hue in HUES.items()
    )
    return (
        f".card{{fill:{GROUND};stroke:{EDGE}}}.grid{{stroke:{EDGE};stroke-width:1}}{lines}"
        f"text{{font:13px system-ui,sans-serif;fill:{INK}}}.small{{font-size:12px}}.bold{{font-weight:600}}"
        f".end{{text-anchor:end;fill:{SOFT}}}.middle{{text-anchor:middle;paint-order:stroke;stroke:{GROUND};stroke-width:5}}"
    )


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _wrapped(text: str, style: str = "small") -> list[tuple[str, str]]:
    letters = LETTERS - 5 * (style == "bold")
    return [(line, style) for line in textwrap.wrap(text.replace(" → ", "\xa0→\xa0"), letters, break_on_hyphens=False)]


def _height(ratio: float, most: float) -> float:
    """The y coordinate of a ratio: the start at the bottom, the largest ratio at the top, with a margin around both."""
    return TOP + HEIGHT - 20 - (HEIGHT - 40) * math.log(max(ratio, 0.5)) / math.log(most)


def _ticks(most: float) -> list[float]:
    """Powers of two, six at most."""
    powers = math.floor(math.log2(most * 1.01))
    return [2.0**power for power in range(0, powers + 1, 1 + powers // 6)] if powers > 1 else [1.0, 1.5, 2.0]
