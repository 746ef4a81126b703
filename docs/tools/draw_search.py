"""Draw docs/search.svg: the family tree of a search on digits, from its stored result.

python docs/tools/draw_search.py [file]

The result, experiments/results/search/digits.json, is what `outgrow search report --json` prints after the search of
examples/search_digits.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outgrow.search.objectives import Objectives
from outgrow.search.records import Record
from outgrow.search.tree_svg import draw_tree

DOCS = Path(__file__).parents[1]
RESULT = DOCS.parent / "experiments" / "results" / "search" / "digits.json"


def draw(path: Path) -> Path:
    facts = json.loads(RESULT.read_text(encoding="utf-8"))
    path.write_text(draw_tree([Record.from_json(trial) for trial in facts["trials"]], Objectives.of(facts["objectives"])))
    return path


if __name__ == "__main__":
    print(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "search.svg"))
