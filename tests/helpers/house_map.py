"""The map of the house in CONTRIBUTING.md, read off the tree: `python -m tests.helpers.house_map` writes it into the page."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, PAGE = ROOT / "src" / "outgrow", ROOT / "CONTRIBUTING.md"
BEGIN, END, WIDTH, COLUMN = "```text\nsrc/outgrow/\n", "```\n", 128, 22

# From the ground up: a module imports only from its own folder, or from what stands before it.
FLOORS = """
    errors wrong_arguments process text growth_plan model modules verify trace analysis exactness methods requests
    history apply optimizers configuration transforms distributed engine saving runs recipes trials checkpoints families
    upcycling integrations comparing scoring search accelerate lightning transformers ray dcp extending api cli
""".split()
BESIDE = ("former_names",)  # imported by name alone, never from within


def purpose(path: Path) -> str:
    """The first line of a file's docstring, or of a folder's."""
    file = path / "__init__.py" if path.is_dir() else path
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def entry(path: Path, depth: int) -> list[str]:
    name = "  " * depth + path.name + ("/" if path.is_dir() else "")
    lines = textwrap.wrap(purpose(path), WIDTH - COLUMN)
    lines = [f"{name:<{COLUMN}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]
    if path.is_dir():
        files = " ".join(file.stem for file in sorted(path.glob("*.py")) if file.stem != "__init__")
        lines += textwrap.wrap(files, WIDTH, initial_indent=" " * (COLUMN + 2), subsequent_indent=" " * (COLUMN + 2))
        folders = (folder for folder in sorted(path.iterdir()) if (folder / "__init__.py").exists())
        lines += [line for folder in folders for line in entry(folder, depth + 1)]
    return lines


def map_of_the_house() -> str:
    paths = [SOURCE / floor if (SOURCE / floor).is_dir() else SOURCE / f"{floor}.py" for floor in (*FLOORS, *BESIDE)]
    return "\n".join(line for path in paths for line in entry(path, 1)) + "\n"


def on_the_page() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.replace(BEGIN + on_the_page(), BEGIN + map_of_the_house(), 1), encoding="utf-8")
