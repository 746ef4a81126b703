"""The documentation is true: its blocks run and print what it says, its links lead somewhere, demo and picture work.

docs/refresh.py runs the blocks; it also writes what they print into the pages.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import outgrow.methods
import outgrow.rules

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
    return module


REFRESH = load(ROOT / "docs" / "refresh.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_says(page: Path) -> None:
    stale = [item for item in REFRESH.told(page) if item.block and not REFRESH.agrees(item.block.text, item.printed)]
    for item in stale:
        print(f"{page.name}:{item.block.line} should read\n{item.printed}")
    assert not stale, "`python docs/refresh.py` writes into the pages what their blocks print"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_worked_examples_of_contributing_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule and the method are put where the page says they go; then the page's own tests run."""
    page = ROOT / "CONTRIBUTING.md"
    namespace: dict[str, Any] = {"__name__": page.stem}
    rules, methods = dict(outgrow.rules.RULES), dict(outgrow.methods.BY_NAME)
    for block in (block for block in REFRESH.blocks_of(page) if block.language == "python"):
        REFRESH.run(block, page, namespace)
        if "RULES" in namespace:
            rules.update(namespace.pop("RULES"))
            monkeypatch.setattr("outgrow.anatomy.RULES", rules)
        if "BY_NAME" in namespace:
            methods.update(namespace.pop("BY_NAME"))
            monkeypatch.setattr("outgrow.methods.BY_NAME", methods)
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()


def test_the_picture_of_how_it_works_can_be_drawn(tmp_path: Path) -> None:
    load(ROOT / "docs" / "draw.py").draw(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("<path") > 100


def test_the_demo_runs_and_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(ROOT / "examples" / "demo.py").main(["--out", str(tmp_path), "--seeds", "1", "--epochs", "4", "--width", "4"])
    printed = capsys.readouterr().out
    assert str(tmp_path / "report.html") in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    rows = {row["arm"]: row for row in json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["table"]}
    for name in ("r2r", "net2net", "netmorph"):
        assert rows[name]["error"] <= rows[name]["tolerance"]
        assert rows[name]["loss_after"][0] == pytest.approx(rows[name]["loss_before"][0], rel=1e-4)
    assert rows["random"]["error"] > 1e-2


def test_the_readme_shows_the_results_that_are_kept() -> None:
    """The demo's table in the README is the one of the committed result file."""
    demo = load(ROOT / "examples" / "demo.py")
    kept = json.loads((ROOT / "docs" / "demo" / "results.json").read_text(encoding="utf-8"))
    config = replace(demo.Config(), **{**kept["config"], "seeds": tuple(kept["config"]["seeds"])})
    assert demo.text_table(config, kept["table"]) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_tells_how_many_families_count() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "coverage.json").read_text())["families"]
    counted = sum(result["counts"] for result in results.values())
    text = (ROOT / "README.md").read_text()
    assert f"timm's {len(results)} families" in text
    assert f"{counted} count as grown" in text
