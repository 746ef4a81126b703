"""The objectives of a search as SVG pictures: trials as points, the Pareto front as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from outgrow.search.drawing import picture, short, text
from outgrow.search.objectives import Objectives
from outgrow.search.pareto import fronts
from outgrow.search.records import Record, complete

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 64, 24, 40, 44  # in pixels
WIDE = 8  # a ratio of largest to smallest value from which an axis is logarithmic


class Axis:
    """A scale from values to pixels; logarithmic if all values are positive and far apart."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = min(values), max(values)
        self.log = low > 0 and high / low >= WIDE
        self.low, self.high = (math.log(low), math.log(high)) if self.log else (low, high)
        if self.low == self.high:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        margin = 0.05 * (self.high - self.low)
        self.low, self.high, self.start, self.end = self.low - margin, self.high + margin, start, end

    def at(self, value: float) -> float:
        place = math.log(value) if self.log else value
        return round(self.start + (self.end - self.start) * (place - self.low) / (self.high - self.low), 1)

    def ticks(self, count: int = 4) -> list[float]:
        """Round values within the axis."""
        if self.log:
            found = [base * 10.0**power for power in range(-12, 16) for base in (1, 2, 5)]
            found = [value for value in found if self.low <= math.log(value) <= self.high]
            return found[:: math.ceil(len(found) / (count + 1))] if found else []
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / count))
        step = next(step * many for many in (1, 2, 5, 10) if (self.high - self.low) / (step * many) <= count)
        first = math.ceil(self.low / step)
        return [round(step * number, 12) for number in range(first, math.floor(self.high / step) + 1)]


def draw_fronts(records: Sequence[Record], objectives: Objectives) -> list[str]:
    """One picture for each objective after the first, against the first; with one objective, its course over the trials."""
    done = complete(records)
    if not done:
        return []
    if len(objectives.names) == 1:
        points = [(float(record.number), record.values[0]) for record in done]
        sign = 1 if objectives.directions[0] == "minimize" else -1
        best = [n for n, (_, y) in enumerate(points) if all(sign * y < sign * other for _, other in points[:n])]
        return [_drawn(points, best, done, "trial", _named(objectives, 0), f"{objectives.names[0]} of each trial")]
    return [
        _drawn(
            points := [(record.values[other], record.values[0]) for record in done],
            _front(points, objectives, other),
            done,
            _named(objectives, other),
            _named(objectives, 0),
            f"{objectives.names[0]} against {objectives.names[other]}",
        )
        for other in range(1, len(objectives.names))
    ]


def _named(objectives: Objectives, number: int) -> str:
    return f"{objectives.names[number]} ({'less' if objectives.directions[number] == 'minimize' else 'more'} is better)"


def _front(points: Sequence[tuple[float, float]], objectives: Objectives, other: int) -> list[int]:
    ways = [-1 if objectives.directions[axis] == "maximize" else 1 for axis in (other, 0)]
    losses = [(ways[0] * x, ways[1] * y) for x, y in points]
    return sorted(fronts(losses)[0], key=lambda number: points[number])


def _drawn(
    points: Sequence[tuple[float, float]], best: Sequence[int], records: Sequence[Record], across: str, up: str, title: str
) -> str:
    x = Axis([point[0] for point in points], LEFT, WIDTH - RIGHT)
    y = Axis([point[1] for point in points], HEIGHT - BOTTOM, TOP)
    parts = [text(LEFT - 48, 22, up, "bold"), text(WIDTH - RIGHT, HEIGHT - 10, across, "bold end")]
    for tick in y.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y.at(tick)}H{WIDTH - RIGHT}"/>')
        parts.append(text(LEFT - 8, y.at(tick) + 4, short(tick), "soft end"))
    parts += [text(x.at(tick), HEIGHT - BOTTOM + 18, short(tick), "soft middle") for tick in x.ticks()]
    line = "".join(
        f"{'M' if not number else 'H'}{x.at(points[at][0])}{' ' if not number else 'V'}{y.at(points[at][1])}"
        for number, at in enumerate(best)
    )
    parts.append(f'<path class="path" d="{line}"/>')
    chosen = set(best)
    for number in sorted(range(len(points)), key=lambda number: number in chosen):  # the front on top
        record, (px, py) = records[number], points[number]
        said = f"trial {record.number}: {'; '.join(record.growth) or 'no growth'} ({short(px)}, {short(py)})"
        kind = "trial best" if number in chosen else "trial"
        parts.append(f'<circle class="{kind}" cx="{x.at(px)}" cy="{y.at(py)}" r="4"><title>{escape(said)}</title></circle>')
    return picture(WIDTH, HEIGHT, title, parts)
