"""The house has floors: a module imports only from its own folder, or from folders below it; and the rules of the house."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import outgrow
from tests.helpers.house_map import BESIDE, FLOORS, ROOT, SOURCE, map_of_the_house, on_the_page, purpose

FOLDERS = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
MOST = 400  # lines


def imported(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Parts of outgrow that a file imports, inside functions too; not what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        names = [alias.name for alias in child.names] if isinstance(child, (ast.Import, ast.ImportFrom)) else []
        if isinstance(child, ast.ImportFrom):
            assert not child.level, "imports are absolute"
            names = [f"{child.module}.{name}" for name in names]
        for name in names:
            if name.partition(".")[0] == "outgrow":
                yield f"{name}.".split(".")[1], child.lineno
        yield from imported(child)


def upward(code: str, floor: str) -> list[str]:
    """Imports of a file that lead to a higher floor, or to the package itself, which holds all floors."""
    places = {name: number for number, name in enumerate(FLOORS)}
    found = [(other, line) for other, line in imported(ast.parse(code)) if places.get(other, len(FLOORS)) > places[floor]]
    return [f"line {line} imports {other or 'outgrow'}" for other, line in found if floor != "cli" or other]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_module_imports_only_from_its_own_folder_and_from_below(floor: str) -> None:
    files = sorted((SOURCE / floor).rglob("*.py")) or [SOURCE / f"{floor}.py"]
    found = {str(file.relative_to(SOURCE)): upward(file.read_text(encoding="utf-8"), floor) for file in files}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "planted",
    [
        "from outgrow.runs.run import Run",
        "from outgrow import runs",
        "import outgrow.runs.run as run",
        "def late():\n    from outgrow.runs.run import Run",
        "class A:\n    def late(self):\n        import outgrow",
        "try:\n    import outgrow.unheard_of\nexcept ImportError:\n    pass",
    ],
)
def test_a_planted_import_from_above_is_found(planted: str) -> None:
    assert upward(planted, "model")


def test_imports_from_below_and_those_for_types_are_fine() -> None:
    assert not upward("from outgrow.errors import GrowthError\nfrom outgrow.model.sandbox import untouched", "model")
    assert not upward("if TYPE_CHECKING:\n    from outgrow.runs.run import Run", "model")


def test_every_file_has_its_floor() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == {*FLOORS, *BESIDE}
    assert len(FLOORS) == len(set(FLOORS))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(SOURCE)))
def test_a_folder_says_in_one_line_what_it_is_for(folder: Path) -> None:
    """A folder whose name users write (`outgrow.recipes.stack`) also lists its public names."""
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    first, _, names = text.partition("\n")
    assert first == f'"""{purpose(folder)}"""'
    assert not names or folder.name in outgrow.MODULES
    assert all(re.fullmatch(r"from [\w.]+ import (\w+) as \1", line) for line in names.split("\n") if line)


def test_tests_mirror_the_source() -> None:
    """Each folder of the source with tests beside it; what else the tests hold is named here."""
    tests = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    source = {path.relative_to(SOURCE) for path in FOLDERS if "former_names" not in path.parts}
    assert source == tests - {Path(), Path("benchmarks"), Path("docs"), Path("experiments")}


def test_no_test_imports_from_another_test() -> None:
    found = {
        path.name: re.findall(r"^\s*(?:from|import) tests\S*\.test_\w+", path.read_text(), re.M)
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert not {name: lines for name, lines in found.items() if lines}


def test_files_are_short_and_say_what_they_are_for() -> None:
    folders = (ROOT / name for name in ("src", "tests", "benchmarks", "experiments", "docs/tools", "examples"))
    files = {path: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    assert not {str(path): text.count("\n") for path, text in files.items() if text.count("\n") > MOST}
    assert not [str(path) for path, text in files.items() if text and not purpose(path)]


def test_the_map_in_contributing_is_that_of_the_tree() -> None:
    assert on_the_page() == map_of_the_house(), "`python -m tests.helpers.house_map` writes the map into the page"


def test_tests_share_helpers_and_import_nothing_from_each_other() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert ".test_" not in f".{node.module}", f"{path} imports from {node.module}: move it to tests/helpers"
        inside = path.relative_to(ROOT / "tests").parts
        if inside[0] not in ("helpers", "outside") and path.stem not in ("__init__", "conftest"):
            assert path.stem.startswith("test_"), f"{path} is no test: move it to tests/helpers"
            folder = SOURCE.joinpath(*inside[:-1])
            assert folder.is_dir() or inside[0] in ("docs", "experiments", "benchmarks"), f"{path} mirrors no folder of src"


def test_no_two_files_of_the_package_have_the_same_name() -> None:
    """Apart from public modules, such as `outgrow.dcp`, and the file behind each of them."""
    files = [path for path in SOURCE.rglob("*.py") if "former_names" not in path.parts and path.parent != SOURCE]
    names = [path.stem for path in files if path.stem != "__init__"]
    assert not {name for name in names if names.count(name) > 1}


def test_kept_results_and_pages_are_apart_from_code() -> None:
    for folder in ("benchmarks/results", "experiments/results"):
        assert {path.suffix for path in (ROOT / folder).rglob("*") if path.is_file()} <= {".json", ".txt", ".safetensors"}
    assert {path.parent for path in (ROOT / "docs").rglob("*.py")} == {ROOT / "docs" / "tools"}


def test_files_that_texts_name_are_there() -> None:
    """In backticks: paths from the root on pages, paths within the package in its docstrings."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for path in re.findall(r"`((?:src|tests|docs|benchmarks|experiments)/[\w/]+\.py)\b", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
    for file in SOURCE.rglob("*.py"):
        for path in re.findall(r"`([a-z]\w*/[\w/]+\.py)`", file.read_text(encoding="utf-8")):
            assert (SOURCE / path).exists() or (ROOT / path).exists(), f"{file} names {path}"


def test_public_modules_and_former_names_can_be_imported() -> None:
    assert importlib.import_module("outgrow.dcp").regrow is importlib.import_module("outgrow.training.dcp").regrow
    assert importlib.import_module("outgrow.training.fade").PActivation is outgrow.PActivation
    assert pickle.loads(b"coutgrow.blocks\nParallel\n.") is outgrow.Parallel  # as pickled models of 0.1.0 name it
    assert pickle.loads(b"coutgrow.folded\nFold\n.") is outgrow.Fold
