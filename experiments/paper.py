"""The paper, item by item, as a page: docs/results/paper.md. Verdicts of experiments are computed from the committed results.

python -m experiments.paper [--results FOLDER] [--out PAGE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.figures import RESULTS
from experiments.reading.against_paper import claims
from experiments.reading.diversity import read_filters
from experiments.reading.earlier_runs import notes
from experiments.reading.paper_items import DEFINITIONS, FIGURES, TABLE_1, Item
from experiments.reading.result_files import ResultsError, read_paper, unusable
from experiments.reading.tables import Numbers, image_error, numbers
from experiments.reading.words import interval, signed

PAGE = Path("docs") / "results" / "paper.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def named(place: str) -> str:
    """A file as code, and a test in it by its name alone."""
    path, _, test = place.partition("::")
    return place if place == "–" else f"`{test or path}`"


def files(names: str) -> str:
    return "<br>".join(f"`{name}`" for name in names.split(", "))


def items(found: Sequence[Item]) -> str:
    rows = [(one.place, one.text, one.verdict, f"{named(one.code)}<br>{named(one.check)}") for one in found]
    return table(("place", "the paper", "verdict", "code, and what checks it"), rows)


def scores(found: Numbers) -> str:
    """Table 2, arm by arm."""
    held, rows = any(row.validation is not None for row in found.final), []
    for row in found.final:
        if row.paper is None or row.difference is None:
            continue
        validation = [] if not held else ["–" if row.validation is None else f"{row.validation:.2f}"]
        ours = f"{row.mean:.2f} ± {row.sd:.2f}", f"{row.late:.2f} ± {row.late_sd:.2f}", *validation
        paper = f"{row.paper:.1f} ± {image_error(row.paper, 1_000):.2f}"
        verdict = "differs" if row.difference.clear else "agrees"
        rows.append((row.arm, paper, *ours, f"{signed(row.difference.value, 2)} {interval(row.difference)}", verdict))
    head = (
        "arm",
        "paper ± s.e.",
        "last epoch",
        "last ten epochs",
        *(["validation"] if held else []),
        "ours − paper",
        "verdict",
    )
    return table(head, rows)


def page(found: Numbers) -> str:
    made = [(one.place, one.paper, one.ours, one.verdict, files(one.results)) for one in claims(found)]
    return f"""# The paper, item by item

Every definition, table, figure and claim of Michael Painter's *Towards a More Complete Theory of Function Preserving
Transforms*: where it is in the code, what checks it, and whether it holds here. Made by `python -m experiments.paper` from
`experiments/results/table`; a test compares the page with the results.

## Definitions and transforms

{items(DEFINITIONS)}

## Table 1: a comparison of the methods

`outgrow.compare` measures this table at a place of your own model ([methods](../methods.md#compare-at-one-place)).

{items(TABLE_1)}

## The results behind the verdicts

{chr(10).join(f"- {one}" for one in notes(found.results)) or "All are of the arms as they are described today."}

## Table 2: final accuracy

The paper's values are one run each on 1,000 validation images, so that each has a standard error of 1.45 points. Ours are
means ± standard deviations over seeds on the 10,000 test images. The interval holds the errors of both; an arm differs if it
excludes zero.

{scores(found)}

## Claims

{table(("place", "the paper", "here", "verdict", "results"), made)}

Why they differ, with intervals, is in the report (`make report`).

## Figures

{items(FIGURES)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.paper", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="a folder of results (default: the committed ones)")
    parser.add_argument("--out", type=Path, default=PAGE, help=f"the page to write (default: {PAGE})")
    options = parser.parse_args(arguments)
    try:
        found = numbers(read_paper(options.results), read_filters(options.results))
        options.out.write_text(page(found), encoding="utf-8")
    except ResultsError as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(unusable(error)) from error
    print(f"{options.out} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
