"""The family tree of a search as an SVG picture: one row per trial, below the trial whose model it has grown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outgrow.search.drawing import LETTER, picture, short, text
from outgrow.search.objectives import Objectives
from outgrow.search.records import COMPLETE, Record, ancestors, pareto_front
from outgrow.text.plurals import counted

ROW, STEP, LEFT, TOP = 24, 22, 24, 56  # in pixels
MOST = 120  # rows; of larger searches, only the trials on the front and their ancestors are drawn
LETTERS = 64  # of a trial's growth


def draw_tree(records: Sequence[Record], objectives: Objectives) -> str:
    """The picture as SVG text. Filled circles are on the Pareto front, crosses have failed; areas grow with parameters."""
    shown = shown_of(records, objectives)
    best = {record.number for record in pareto_front(records, objectives)}
    drawn = list(rows(shown))
    most = max((record.parameters for record in shown), default=1) or 1
    parts: list[str] = []
    places: dict[int | None, tuple[int, int]] = {}
    widths = [360.0]
    for row, (record, depth) in enumerate(drawn):
        x, y = LEFT + STEP * depth, TOP + ROW * row
        if record.parent in places:
            above = places[record.parent]
            parts.insert(0, f'<path class="line" d="M{above[0]} {above[1]}V{y}H{x}"/>')
        places[record.number] = x, y
        parts.append(_mark(record, x, y, record.number in best, most))
        said, measured = label(record), values(record, objectives)
        parts.append(text(x + 16, y + 4, said, "bold" if record.number in best else "", measured))
        widths.append(x + 42 + LETTER * (len(said) + len(measured)))
    left_out = len(records) - len(shown)
    title = f"{counted(len(records), 'trial')}: each has grown the model of the trial above it"
    note = f"filled: no other trial is better in all objectives{f'; {left_out} others are not drawn' if left_out else ''}"
    head = [text(LEFT - 8, 22, title, "bold"), text(LEFT - 8, 38, note, "soft")]
    width = max(*widths, 16 + LETTER * max(len(title), len(note)) + LEFT)
    return picture(round(width), TOP + ROW * len(drawn), title, [*head, *parts])


def shown_of(records: Sequence[Record], objectives: Objectives) -> list[Record]:
    """The trials to show: all or, of many, those on the Pareto front and their ancestors."""
    if len(records) <= MOST:
        return list(records)
    kept = {one.number for best in pareto_front(records, objectives) for one in (best, *ancestors(best, records))}
    return [record for record in records if record.number in kept]


def rows(records: Sequence[Record]) -> Iterator[tuple[Record, int]]:
    """Trials with their depths; children follow their parent, in order."""
    numbers = {record.number for record in records}
    children: dict[int | None, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.number):
        children.setdefault(record.parent if record.parent in numbers else None, []).append(record)
    stack = [(record, 0) for record in reversed(children.get(None, []))]
    while stack:
        record, depth = stack.pop()
        yield record, depth
        stack += [(child, depth + 1) for child in reversed(children.get(record.number, []))]


def _mark(record: Record, x: float, y: float, best: bool, most: int) -> str:
    if record.state != COMPLETE:
        return f'<path class="failed" d="M{x - 4} {y - 4}l8 8m0 -8l-8 8"/>'
    radius = 3 + 6 * (record.parameters / most) ** 0.5
    return f'<circle class="trial{" best" if best else ""}" cx="{x}" cy="{y}" r="{radius:.1f}"/>'


def label(record: Record) -> str:
    """The number of a trial, and its growth in words."""
    usual = "the parent" if record.parent is None else "trained on"
    said = "; ".join(record.growth) or usual
    said = said if len(said) <= LETTERS else f"{said[: LETTERS - 1]}…"
    back = f" (back from {record.shrunk_from})" if record.shrunk_from is not None else ""
    return f"{record.number}  {said}{back}"


def values(record: Record, objectives: Objectives) -> str:
    """The objectives of a trial, or why it has none."""
    if record.state != COMPLETE:
        return record.outcome or record.state.lower()
    return ", ".join(f"{name} {short(value)}" for name, value in zip(objectives.names, record.values, strict=True))
