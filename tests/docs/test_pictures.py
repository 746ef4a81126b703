"""The pictures of docs/transforms.md: each is named on the page, can be drawn, and is what the library does today.

Drawing checks in itself that plans tell the truth about the numbers and that outputs are kept (docs/tools/specimens.py).
"""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import matplotlib
import pytest

DOCS = Path(__file__).parents[2] / "docs"
COMMITTED = sorted((DOCS / "transforms").glob("*"))


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    return importlib.import_module("draw_transforms")


def test_the_page_shows_all_pictures_once_and_no_others(drawing: ModuleType) -> None:
    shown = re.findall(r"^!\[[^\]]+\]\(transforms/(\S+)\)$", (DOCS / "transforms.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == [path.name for path in COMMITTED]
    assert sorted(shown) == sorted(f"{name}.svg" for name in drawing.DRAWINGS)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_pictures_are_small_and_whole(path: Path) -> None:
    """All that is used in a file is defined in it, once: the writer renames and moves what matplotlib defines."""
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < 60_000
    tree = list(ET.fromstring(text).iter())
    defined = [element.get("id") for element in tree if element.get("id")]
    used = {element.get("href", "").removeprefix("#") for element in tree if element.tag.endswith("}use")}
    assert len(defined) == len(set(defined))
    assert used
    assert used <= set(defined)


@pytest.mark.parametrize("name", ["r2r", "deepen"])
def test_pictures_are_up_to_date(drawing: ModuleType, name: str, tmp_path: Path) -> None:
    """Byte for byte, where they were drawn by the matplotlib that is here."""
    committed = (DOCS / "transforms" / f"{name}.svg").read_bytes()
    drawn, again = drawing.draw(name, tmp_path).read_bytes(), drawing.draw(name, tmp_path).read_bytes()
    assert drawn == again
    if f"Matplotlib v{matplotlib.__version__}," in committed.decode():
        assert drawn == committed, "`python docs/tools/draw_transforms.py` draws them again"


def test_the_timeline_is_that_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    drawn = importlib.import_module("draw_timeline").draw(tmp_path / "timeline.svg")
    assert drawn.read_text(encoding="utf-8") == (DOCS / "timeline.svg").read_text(encoding="utf-8")


def test_the_tree_of_a_search_is_that_of_its_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    drawn = importlib.import_module("draw_search").draw(tmp_path / "search.svg")
    assert drawn.read_text(encoding="utf-8") == (DOCS / "search.svg").read_text(encoding="utf-8")


def test_the_family_is_drawn_from_a_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    drawn = importlib.import_module("draw_family").draw(tmp_path / "families.svg").read_text(encoding="utf-8")
    committed = (DOCS / "families.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{matplotlib.__version__}," in committed:
        assert drawn == committed, "`python docs/tools/draw_family.py` draws it again"
