"""Text tables: they fit the given width and lose no text; with and without rich."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outgrow.text import tables

cells = st.text("ab.0 ", max_size=60) | st.sampled_from(["layer1.0.conv2 + 3 more", "r2r, net2net", ""])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(cells, cells, cells), max_size=5), st.integers(44, 150))
def test_a_plain_table_fits_and_loses_nothing(rows: list[tuple[str, str, str]], width: int) -> None:
    text = tables.plain_table(("one", "two", "three"), rows, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1].replace("─", "").strip() == ""
    for letter in "ab.0":
        assert text.count(letter) == sum(cell.count(letter) for row in rows for cell in row)


def bare(text: str) -> str:
    """Text without colours."""
    return "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines())


def test_rich_tables_have_the_same_cells_and_rich_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    header, rows = ("volume", "size"), [("layer1.0.conv1", "64"), ("[bold]x", "8")]
    plain, rich = tables.plain_table(header, rows, 60), bare(tables.rich_table(header, rows, 60))
    assert (
        rich.replace("─", " ").split()
        == plain.replace("─", " ").split()
        == ["volume", "size", "layer1.0.conv1", "64", "[bold]x", "8"]
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert rich != plain
    assert bare(tables.make_table(header, rows)) == rich
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in [name for name in sys.modules if name.startswith("rich.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert tables.make_table(header, rows) == plain
