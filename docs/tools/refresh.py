"""Run the python blocks of the documentation; write what they print into the text blocks that follow them.

    python docs/tools/refresh.py          rewrites README.md and the pages under docs/
    python docs/tools/refresh.py FILE …   rewrites these

The blocks of a file share one namespace, in order. Every file has a process of its own, since blocks register methods and
operators. A console block is one command, `$ outgrow …`, and what it prints. A line "…" in a text or console block stands for
any lines: such blocks are compared by the tests, and left as they are here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, where that begins and ends in the page, and on which line."""

    language: str
    text: str
    start: int
    end: int
    line: int


@dataclass(frozen=True)
class Output:
    """What a block printed, and the block of the page that shows it (None if there is none)."""

    printed: str
    block: Block | None


def pages() -> list[Path]:
    """README and the documentation, without the notebooks' pages (`notebook_pages.py` writes those)."""
    written = (page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "notebooks")
    return [ROOT / "README.md", *sorted(written)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], match.start(2), match.end(2), text.count("\n", 0, match.start(2)) + 1)
        for match in FENCE.finditer(text)
    ]


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Execute a python block (line numbers in tracebacks are those of the page) and return what it printed."""
    printed = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return tidy(printed.getvalue())


def command(block: Block) -> str:
    """Carry out a console block's command and return it with what it printed."""
    from outgrow.cli.main import main

    line = block.text.partition("\n")[0]
    if not line.startswith("$ outgrow "):
        raise ValueError(f"a console block begins with '$ outgrow', not with {line!r}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), patch.dict(os.environ, COLUMNS="128"):
        main(line.split()[2:])
    return tidy(f"{line}\n{printed.getvalue()}")


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n")) + "\n"


def outputs(page: Path) -> Iterator[Output]:
    """Run a page from top to bottom. Blocks may change the working directory; at the end it is the former one again."""
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": page.stem}
    blocks, folder = blocks_of(page), Path.cwd()
    try:
        for block, after in zip(blocks, itertools.chain(blocks[1:], [None]), strict=False):
            if block.language == "python":
                yield Output(run(block, page, namespace), after if after is not None and after.language == "text" else None)
            elif block.language == "console":
                yield Output(command(block), block)
    finally:
        os.chdir(folder)


def agrees(text: str, printed: str) -> bool:
    """Whether a block says what was printed.

    Numbers in scientific notation are rounding errors, which differ between machines: any such number will do.
    """
    lines = []
    for line in tidy(text).split("\n"):
        number = re.sub(r"\d+(?:\\\.\d+)?e(?:\\-|\\\+)\d+", r"[-+.e\\d]+", re.escape(line))
        lines.append(r"(?:.*\n)*?.*" if line.strip() == "…" else number)
    return re.fullmatch("\n".join(lines), printed) is not None


def refresh(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for item in reversed(list(outputs(page))):
        if item.block is not None and not agrees(item.block.text, item.printed) and "\n…\n" not in item.block.text:
            text = text[: item.block.start] + item.printed + text[item.block.end :]
    page.write_text(text, encoding="utf-8")


def main(names: list[str]) -> int:
    """Refresh one page here, or several in a process each; returns how many failed."""
    if len(names) == 1:
        sys.path.insert(0, str(ROOT))
        importlib.import_module("tests.conftest")  # lets timm be imported beside a torch without CUDA
        refresh(Path(names[0]))
        return 0
    failed = [name for name in names if subprocess.run([sys.executable, __file__, name]).returncode]
    for name in failed:
        print(f"{name}: a block failed, see above; the page is unchanged", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [str(page) for page in pages()]))
