"""Text tables that fit the width of the terminal, and large numbers in short form."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

NARROW = 12  # no column gets narrower than this
WIDTH = 120  # if there is no terminal


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that fits the terminal: drawn by rich if it is installed and stdout is a terminal, else plain text."""
    rows, width = list(rows), shutil.get_terminal_size((WIDTH, 24)).columns
    if sys.stdout.isatty():
        try:
            return rich_table(header, rows, width)
        except ImportError:
            pass
    return plain_table(header, rows, width)


def rich_table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=width, highlight=False)
    table = Table(*header, box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> str:
    """A table with two blanks between columns; the widest columns are wrapped until all fit."""
    cells = [tuple(header), *map(tuple, rows)]
    widths = _fitted(list(zip(*cells, strict=True)), width - 2 * (len(header) - 1))
    lines = []
    for index, row in enumerate(cells):
        wrapped = [textwrap.wrap(cell, size, break_on_hyphens=False) or [""] for cell, size in zip(row, widths, strict=True)]
        for at in range(max(map(len, wrapped))):
            line = [(w[at] if at < len(w) else "").ljust(size) for w, size in zip(wrapped, widths, strict=True)]
            lines.append("  ".join(line).rstrip())
        if not index:
            lines.append("  ".join("─" * size for size in widths))
    return "\n".join(lines)


def _fitted(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of columns: the widest is narrowed first, down to its longest word, and below that only if necessary."""
    widths = [max(map(len, column)) for column in columns]
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    for floors in (words, [min(word, NARROW) for word in words]):
        while sum(widths) > width:
            spare = [(size, index) for index, size in enumerate(widths) if size > floors[index]]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
    return widths


def rounded(number: int) -> str:
    """A large number in short form, with three digits.

    Example:
        >>> [rounded(number) for number in (812, 11_181_642, 999_960)]
        ['812', '11.2 M', '1.00 M']
    """
    for unit, power in (("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        value = number / 10**power
        if value >= 0.9995:
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return str(number)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A plain text table."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "  ".join("─" * width for width in widths), *lines[1:]])
