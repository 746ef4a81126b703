"""The notebooks run, print what they show, and are the pages of the site."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    return importlib.import_module("notebook_pages")


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["grow-a-language-model", "grow-a-timm-model"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_prints_what_it_shows(tool: ModuleType, path: Path) -> None:
    kept = tool.read(path)
    for shown, now in zip(tool.outputs(kept), tool.outputs(tool.executed(kept)), strict=True):
        assert tool.alike(shown, now), f"`python docs/tools/notebook_pages.py` keeps the new outputs:\n{shown}\n---\n{now}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_is_the_notebook(tool: ModuleType, path: Path) -> None:
    text, pictures = tool.page(tool.read(path), path.stem)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == text, "`python docs/tools/notebook_pages.py` writes the page"
    assert pictures
    assert all((path.parent / name).read_bytes() == picture for name, picture in pictures.items())
    cells = tool.read(path)["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert path.stat().st_size < 200_000


def test_outputs_are_compared_with_tolerance_for_fractions_only(tool: ModuleType) -> None:
    assert tool.alike("loss 1.23, 4 blocks", "loss 1.27, 4 blocks")
    assert not tool.alike("loss 1.23, 4 blocks", "loss 1.23, 5 blocks")
    assert not tool.alike("loss 1.23", "loss 2.46")
    assert tool.alike("moved by 1e-07", "moved by 3e-08")
