"""The documentation is true: its blocks run and print what it says, its links lead somewhere, demo and picture work.

docs/tools/refresh.py runs the blocks; it also writes what they print into the pages.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import outgrow.analysis.rules.all_rules
import outgrow.methods.all_methods
from experiments import demo
from experiments.reading.demo_lines import lead, loss_at_growth, text_table
from experiments.reading.result_files import read_all
from experiments.reading.words import tiny

ROOT = Path(__file__).parents[2]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
    return module


REFRESH = load(ROOT / "docs" / "tools" / "refresh.py")
PAGES = REFRESH.pages()
OLDEST = torch.__version__.startswith("2.6")
MARKS = {
    "docs/trainers.md": (
        pytest.mark.filterwarnings("ignore"),  # warnings of Lightning itself
        pytest.mark.skipif(OLDEST, reason="fully_shard of torch 2.6 runs on GPUs only"),
    ),
    "docs/grow-a-language-model.md": (
        pytest.mark.skipif(OLDEST, reason="torch 2.6 does not say where tensors lie in optimizer.pt"),
    ),
}


@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(name_of(page), ())) for page in PAGES], ids=name_of)
def test_blocks_run_and_print_what_the_page_says(page: Path) -> None:
    stale = [item for item in REFRESH.outputs(page) if item.block and not REFRESH.agrees(item.block.text, item.printed)]
    for item in stale:
        print(f"{page.name}:{item.block.line} should read\n{item.printed}")
    assert not stale, "`python docs/tools/refresh.py` writes into the pages what their blocks print"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_worked_examples_of_contributing_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each recipe adds is put where the page says it goes; then the page's own tests run."""
    page = ROOT / "CONTRIBUTING.md"
    namespace: dict[str, Any] = {"__name__": page.stem}
    rules, methods = dict(outgrow.analysis.rules.all_rules.RULES), dict(outgrow.methods.all_methods.BY_NAME)
    for block in (block for block in REFRESH.blocks_of(page) if block.language == "python"):
        REFRESH.run(block, page, namespace)
        if "BINARY" in namespace:
            words = (word for word in namespace.pop("BINARY") if word != "…")
            rules.update({f"aten.{word}": outgrow.analysis.rules.elementwise.pointwise for word in words})
            monkeypatch.setattr("outgrow.analysis.analyse.RULES", rules)
        if "RULES" in namespace:
            rules.update(namespace.pop("RULES"))
            monkeypatch.setattr("outgrow.analysis.analyse.RULES", rules)
        if "BY_NAME" in namespace:
            methods.update(namespace.pop("BY_NAME"))
            monkeypatch.setattr("outgrow.methods.all_methods.BY_NAME", methods)
        if "TABLE" in namespace:
            table = importlib.import_module("outgrow.transforms.all_transforms")
            monkeypatch.setattr(table, "TABLE", (*table.TABLE, *namespace.pop("TABLE")))
        if "TRIGGERS" in namespace:
            triggers = importlib.import_module("outgrow.runs.triggers")
            monkeypatch.setattr(triggers, "TRIGGERS", triggers.TRIGGERS | namespace.pop("TRIGGERS"))
        if "WIDTHS" in namespace:
            sizes = importlib.import_module("outgrow.configuration.follow_sizes")
            monkeypatch.setattr(sizes, "WIDTHS", (*sizes.WIDTHS, *namespace.pop("WIDTHS")))
    tests = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(tests) == 6
    for test in tests:
        test()


def test_places_that_contributing_names_are_there() -> None:
    """The files, and the tables in them, to which something is added."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:src|docs|tests|benchmarks|experiments)/[^`]*)`", page)
    made_up = {f"src/outgrow/{name}.py" for name in ("methods/echo", "transforms/vocabulary", "integrations/loop", "loop")}
    assert len(paths) > 40
    assert {path for path in paths if not (ROOT / path).exists()} == made_up
    tables = re.findall(r"`([A-Z_]+)`(?: at the end)? (?:in|of) `([^` ]+\.py)`", page)
    assert len(tables) > 8
    for table, path in tables:
        assert re.search(rf"^{table}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path} has no {table}"


def test_the_picture_of_how_it_works_can_be_drawn(tmp_path: Path) -> None:
    load(ROOT / "docs" / "tools" / "draw.py").draw(tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").count("<path") > 100


@pytest.mark.parametrize("budgets", [("1",), pytest.param(("1", "2"), marks=pytest.mark.exhaustive)])
def test_the_demo_runs_and_writes_its_report(
    budgets: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.main(["--out", str(tmp_path), "--seeds", "2", "--epochs", "1", "--budgets", *budgets])
    printed = capsys.readouterr().out
    assert str(tmp_path / "report.html") in printed
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "image/png" not in page
    assert "{{" not in page
    assert not re.search(r"0\.0000|nan|inf%", printed + page.partition('id="data"')[0])
    results = read_all(tmp_path / "results")
    spent = {name: sum(stage["flops"][-1] for stage in one["curves"]["0"]) for name, one in results.items()}
    for way in ("grown", "on", "random"):
        assert spent[f"{way}@{budgets[-1]}"] == pytest.approx(spent[f"scratch@{budgets[-1]}"], rel=0.02)  # equal FLOPs
    for way, kept in (("grown", True), ("random", False)):
        for seed, (after,) in results[f"{way}@{budgets[-1]}"]["curves"].items():
            before = results["small"]["curves"][seed][-1]["test_loss"][-1]
            assert kept == (abs(after["test_loss"][0] / before - 1) < 1e-4) == after["growth"]["preserving"]


def test_the_pages_show_the_results_that_are_kept() -> None:
    """The demo's table and picture, and the sentences on it, are those of the committed result files."""
    results = read_all(ROOT / "experiments" / "results" / "demo")
    assert text_table(results) in (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert demo.drawn(results) == (ROOT / "docs" / "demo" / "demo.svg").read_text(encoding="utf-8"), (
        "python -m experiments.demo --kept"
    )
    before, after, _ = loss_at_growth(results, "random")
    assert after / before > 30
    early, late = lead(results, "scratch", 1), lead(results, "scratch", 8)
    assert early.clear
    assert late.clear
    assert late.value < 0 < early.value
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "random padding multiplies the test loss at the growth by more than 30, and r2r leaves it unchanged" in readme
    assert "far ahead of one that starts over; with a long budget it is behind" in readme


def test_a_table_of_the_demo_by_hand() -> None:
    """Two rows, from the raw files."""
    results = read_all(ROOT / "experiments" / "results" / "demo")

    def last(arm: str) -> list[float]:
        return [100 * stages[-1]["accuracy"][-1] for stages in results[arm]["curves"].values()]

    lines = {line.split("  ")[0]: line for line in text_table(results).splitlines()}
    assert f"{sum(last('grown@4')) / 5:.1f}" in lines["grown, trained on"]
    lead_of = [a - b for a, b in zip(last("grown@8"), last("on@8"), strict=True)]
    assert f"{sum(lead_of) / 5:+.1f} ▲" in lines["grown − trained on"]


@pytest.mark.parametrize(("value", "said"), [(0.0, "no difference"), (3.4e-7, "3·10⁻⁷"), (2e-16, "2·10⁻¹⁶"), (0.96, "1·10⁰")])
def test_small_differences_are_powers_of_ten(value: float, said: str) -> None:
    assert tiny(value) == said


def test_the_readme_says_how_many_families_count() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "coverage.json").read_text())["families"]
    counted = sum(result["counts"] for result in results.values())
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"timm's {len(results)} families" in text
    assert f"{counted} count as grown" in text
    others = json.loads((ROOT / "benchmarks" / "results" / "coverage_others.json").read_text())["models"]
    assert f"of {len(others)} models of other libraries {sum(result['counts'] for result in others.values())} count" in text


def test_the_limits_say_how_long_growths_take() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "large.json").read_text())
    slowest = max(family["widen_s"] for family in measured["families"].values())
    text = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split())
    assert f"took {measured['layers']['24']['widen_s']:.1f} s of CPU time for a Llama of 24 layers" in text
    assert f"at most {slowest:.1f} s for the smallest models of timm's {len(measured['families'])} families" in text


@pytest.mark.exhaustive
def test_pages_are_refreshed_without_effect_on_each_other(tmp_path: Path) -> None:
    """Both pages register another method under one name; the third fails, and stays as it is."""
    method = """```python
from dataclasses import dataclass
import outgrow

@dataclass(frozen=True, kw_only=True)
class Other(outgrow.R2R):
    name = "other"

outgrow.register_method("other", Other)
print(len(outgrow.methods.base.REGISTERED))
```

```text
```
"""
    pages = [tmp_path / f"{name}.md" for name in ("one", "two", "three")]
    for page in pages:
        page.write_text(method.replace("print(", "wrong(") if page.stem == "three" else method)
    done = subprocess.run([sys.executable, ROOT / "docs" / "tools" / "refresh.py", *pages], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "three.md: a block failed" in done.stderr
    assert [page.read_text().count("```text\n1\n```") for page in pages] == [1, 1, 0]
