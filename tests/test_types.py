"""The package is typed: `mypy --strict` passes on examples of the documentation, and on a plugin."""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import subprocess
import symtable
import sys
from pathlib import Path

import pytest

import outgrow

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def imports_of(block: str) -> dict[str, str]:
    """The names that a block imports, each with the statement."""
    found = [node for node in ast.walk(ast.parse(block)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).partition(".")[0]: ast.unparse(one) for one in found for alias in one.names}


def names_in(block: str) -> tuple[set[str], set[str]]:
    """The names that a block defines (except for imports), and those that it uses from elsewhere."""
    top = symtable.symtable(block, "block", "exec")
    tables = [top]
    for table in tables:
        tables.extend(table.get_children())
    symbols = [(table, symbol) for table in tables for symbol in table.get_symbols()]
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = {symbol.get_name() for table, symbol in symbols if symbol.is_referenced() and (table is top or symbol.is_global())}
    return own - set(imports_of(block)), {name for name in used - own if not hasattr(builtins, name)}


def program(blocks: list[str], number: int) -> str:
    """A block as a program: after its imports and the earlier blocks that define the names it uses."""
    needed, imports, todo = {number}, dict(imports_of(blocks[number])), [number]
    while todo:
        at = todo.pop()
        for name in sorted(names_in(blocks[at])[1]):
            earlier = [n for n in range(at) if name in names_in(blocks[n])[0] or name in imports_of(blocks[n])]
            assert earlier, f"block {at + 1} uses {name}, which no block before it defines"
            last = earlier[-1]
            if name in imports_of(blocks[last]):
                imports[name] = imports_of(blocks[last])[name]
            elif last not in needed:
                needed.add(last)
                todo.append(last)
    return "\n".join([*dict.fromkeys(imports.values()), *(blocks[n] for n in sorted(needed))])


def test_a_block_is_joined_with_those_whose_names_it_uses() -> None:
    blocks = [
        "import torch\nx = torch.ones(3)\n",
        "y = 2\n",
        "def f():\n    z = x\n    return z\nprint(f())\n",
        "try:\n    print([f() for _ in range(y)])\nexcept ValueError as error:\n    print(error)\n",
        "y = 'text'\n",
    ]
    assert program(blocks, 1) == blocks[1]
    assert program(blocks, 2) == "\n".join([blocks[0], blocks[2]])
    assert program(blocks, 3) == "\n".join(blocks[:4])


@pytest.mark.skipif(sys.platform == "win32", reason="mypy is run once, on the platforms of the developers")
def test_strict_mypy_passes_on_examples_of_the_documentation_and_on_a_plugin(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    for page in ("README", "docs/widen", "docs/deepen", "docs/refusals"):
        blocks = BLOCK.findall((ROOT / f"{page}.md").read_text(encoding="utf-8"))
        assert blocks
        for number in range(len(blocks)):
            file = tmp_path / f"{page.replace('/', '_')}_{number + 1:02}.py"
            file.write_text(program(blocks, number), encoding="utf-8")
    files = [
        *sorted(map(str, tmp_path.glob("*.py"))),
        str(shutil.copytree(ROOT / "tests" / "outside" / "outside_growth", tmp_path / "outside_growth")),
    ]
    # the same options as for the package itself (strict), so that mypy's cache serves both
    done = subprocess.run([sys.executable, "-m", "mypy", *files], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_is_marked_as_typed_and_exports_its_names() -> None:
    folder = Path(outgrow.__file__).parent
    assert (folder / "py.typed").exists()
    exported = re.findall(r"^from \S+ import (\w+) as (\w+)$", (folder / "api.py").read_text(), re.MULTILINE)
    assert all(name == known for name, known in exported)
    assert sorted(name for name, _ in exported) == sorted(outgrow.__all__)
