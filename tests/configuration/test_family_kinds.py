"""Families of Transformers × kinds of growth: each cell of the table is exact and loads without outgrow, or is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import family_page
from tests.helpers.family_cases import KINDS, TABLE, Row
from tests.helpers.family_trials import try_cells

pytest.importorskip("transformers")

CELLS = [(row, kind) for row in TABLE for kind in KINDS]
QUICK = {
    ("Gemma3", "depth"),
    ("GPT-2", "width"),
    ("Gemma2", "width"),
    ("T5", "width"),
    ("BERT", "depth"),
    ("Mistral", "head_dim"),
    ("Gemma3", "head_dim"),
}


def check(cells: Sequence[tuple[Row, str]], folder: Path) -> None:
    unexpected = [f"{trial}: {trial.unexpected}" for trial in try_cells(cells, folder) if trial.unexpected]
    assert not unexpected, "\n".join(unexpected)


def test_some_cells_of_the_table(tmp_path: Path) -> None:
    check([(row, kind) for row, kind in CELLS if (row.name, kind) in QUICK], tmp_path)


@pytest.mark.exhaustive
def test_all_cells_of_the_table(tmp_path: Path) -> None:
    check(CELLS, tmp_path)


def test_the_page_shows_the_table() -> None:
    assert family_page.PAGE.read_text(encoding="utf-8") == family_page.page(), "run python -m tests.helpers.family_page"
