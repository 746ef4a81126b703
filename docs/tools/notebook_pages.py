"""Run the notebooks under docs/notebooks, keep their outputs, and write each as a page of the site.

    python docs/tools/notebook_pages.py          runs all of them
    python docs/tools/notebook_pages.py FILE …   runs these

A code cell's outputs are what it prints and the figures that it leaves open, as in Jupyter. The picture's description is the
cell's metadata "alt". Cells are run by plain Python in one namespace, without a kernel.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

DOCS = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d[\d,]*\.\d+(?:e[-+]?\d+)?|\d+e[-+]\d+")


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of a new run."""
    return notebook | {"cells": list(_executed(notebook["cells"]))}


def _executed(cells: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "notebook"}
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            yield cell
            continue
        count += 1
        printed = io.StringIO()
        code = compile("".join(cell["source"]), f"<cell {count}>", "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
        yield cell | {"execution_count": count, "outputs": outputs + [_shown(figure) for figure in _figures()]}


def _figures() -> Iterator[bytes]:
    plt = importlib.import_module("matplotlib.pyplot")
    for number in plt.get_fignums():
        drawn = io.BytesIO()
        plt.figure(number).savefig(drawn, format="png", dpi=110, bbox_inches="tight", metadata={"Software": None})
        plt.close(number)
        yield drawn.getvalue()


def _shown(picture: bytes) -> dict[str, Any]:
    return {"data": {"image/png": base64.b64encode(picture).decode()}, "metadata": {}, "output_type": "display_data"}


def page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![{cell['metadata']['alt']}]({file})")
    parts.append(f"[Download this page as a notebook]({name}.ipynb)")
    return "\n\n".join(parts) + "\n", pictures


def outputs(notebook: dict[str, Any]) -> list[str]:
    """What each code cell printed, and how many pictures it left."""
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
            found.append(f"{text}{sum(output['output_type'] == 'display_data' for output in cell['outputs'])} pictures")
    return found


def alike(text: str, other: str) -> bool:
    """Whether two outputs agree. Decimal fractions may differ by a tenth, since training differs between machines."""
    if NUMBER.sub("#", text) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(text), NUMBER.findall(other), strict=True)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(abs(a - b) <= max(0.05, 0.1 * abs(a)) for a, b in values)


def main(paths: list[Path]) -> None:
    for path in paths:
        notebook = executed(read(path))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        text, pictures = page(notebook, path.stem)
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        for name, picture in pictures.items():
            (path.parent / name).write_bytes(picture)


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    importlib.import_module("tests.conftest")  # lets timm be imported beside a torch without CUDA
    main([Path(name) for name in sys.argv[1:]] or NOTEBOOKS)
