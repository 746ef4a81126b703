"""Draw docs/timeline.svg: the schedule of docs/runs.md, as the page itself shows it.

python docs/tools/draw_timeline.py [file]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]


def draw(path: Path) -> Path:
    page = (DOCS / "runs.md").read_text(encoding="utf-8")
    first = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)[0]
    names: dict[str, Any] = {}
    exec(first.replace("print(run.timeline)", ""), names)
    names["run"].timeline.svg(path)
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "timeline.svg"))
