"""Build the documentation site: `python docs/tools/build_site.py [folder]`, by default into site/.

Zensical builds in strict mode, so dead links and unknown references are errors. It only reports docstrings that do not
match their signatures; here those reports are errors, too. Besides the pages the site has their Markdown sources, and
`llms.txt`, a table of contents for language models (https://llmstxt.org).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TOOLS = Path(__file__).resolve().parent
DOCS = TOOLS.parent
ROOT = DOCS.parent


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml; the values of environment variables do not matter here."""


Loader.add_constructor("!ENV", lambda loader, node: None)


def build(out: Path) -> None:
    """Build in a temporary folder, and replace `out` only if there was no complaint."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("tools"))
        shutil.copy(ROOT / "mkdocs.yml", folder)
        sources = {"OUTGROW_SOURCE": str(ROOT / "src"), "OUTGROW_EXAMPLES": str(TOOLS / "docstring_examples.py")}
        ran = subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=folder,
            env=os.environ | sources | {"NO_COLOR": "1"},
            capture_output=True,
            text=True,
        )
        complaints = [line for line in ran.stderr.splitlines() if line.strip() not in ("", "No issues found")]
        if ran.returncode or complaints:
            raise SystemExit("\n".join([ran.stdout, *complaints, "the site was not built"]))
        site = folder / "site"
        for _, path in pages():
            (site / path).parent.mkdir(exist_ok=True)
            shutil.copy(DOCS / path, site / path)
        for page in site.rglob("*.html"):
            page.write_text(breakable(page.read_text(encoding="utf-8")), encoding="utf-8")
        (site / "llms.txt").write_text(contents(), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(site, out)


def breakable(page: str) -> str:
    """Long names and paths in tables may break behind a slash or an underscore, so that no column is pushed out of sight.

    Numbers as 9e-16 stay on one line, which a hyphen would end.
    """

    def name(found: re.Match[str]) -> str:
        return re.sub(r"([/_])(?=\w)", r"\1<wbr>", found[0])

    def cell(found: re.Match[str]) -> str:
        text = re.sub(r"(?<=>)[^<]+", lambda words: re.sub(r"[\w/.@:-]{18,}", name, words[0]), found[0])
        return re.sub(r"\d+e-\d+", r'<span style="white-space: nowrap">\g<0></span>', text)

    return re.sub(r"<td[^>]*>.*?</td>", cell, page, flags=re.DOTALL)


def settings() -> dict[str, Any]:
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader))


def pages() -> list[tuple[str, str]]:
    """Title and path of every page, in the order of the navigation."""

    def walk(entries: list[Any], above: str = "") -> Iterator[tuple[str, str]]:
        for entry in entries:
            title, inside = next(iter(entry.items())) if isinstance(entry, dict) else (above, entry)
            if isinstance(inside, str):
                yield title, inside
            else:
                yield from walk(inside, title)

    return list(walk(settings()["nav"]))


def contents() -> str:
    """The text of llms.txt: each page with its first paragraph."""
    said = settings()
    lines = [f"# {said['site_name']}", "", f"> {said['site_description']}", "", "## Pages", ""]
    lines += [f"- [{title}]({path}): {first_paragraph(DOCS / path)}" for title, path in pages()]
    return "\n".join(lines) + "\n"


def first_paragraph(page: Path) -> str:
    """The first paragraph of prose below the title, on one line, without links."""
    text = re.sub(r"^```.*?^```$|^:::.*?$|^!\[.*?$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip() and not part.lstrip().startswith(("#", "<", "|"))]
    return re.sub(r"\[([^\]]*)\][(\[][^)\]]*[)\]]", r"\1", " ".join(paragraphs[0].split()))


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site")
