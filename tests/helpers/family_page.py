"""The page with the table of families and kinds: `python -m tests.helpers.family_page` writes it from `family_cases.TABLE`."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.family_cases import KINDS, TABLE, Cell

PAGE = Path(__file__).parents[2] / "docs" / "results" / "language-models.md"
TEXT = """# Families of Transformers

Growths of {count} model families by kind: all MLPs (`outgrow.Widen(kind="mlp", factor=1.5)`), all heads, the
size of a head (`outgrow.Widen(kind="head_dim", factor=2)`), the width of the residual stream, and the number of blocks
(`outgrow.Deepen(layers=4)`). The models are small, and every parameter is random.
“Exact” means that a growth passed all of this:

- the outputs are those of the ungrown model, on other inputs than the example: the relative difference is below 1e-12 in
  float64, below 5e-6 where the library computes norms or rotary tables in float32, and below 5e-5 for Mixtral, whose experts
  have no float64;
- decoders generate the same tokens, with a cache;
- the model is saved with `save_pretrained`, and a process that never imports outgrow loads it with the same outputs and
  tokens, also with other random weights;
- the optimizer, which has made a step before, makes the next one.

The tests check the table (`tests/configuration/test_family_kinds.py`, cells in `tests/helpers/family_cases.py`), and
`python -m tests.helpers.family_page` writes this page from it. A refused growth leaves the model unchanged; where only the
configuration can’t describe the grown model, `outgrow.grow` reports that, and `outgrow.save` can still save it.

{table}

Exact and loaded again: {totals}, of {count} each.
"""


def cell_text(cell: Cell) -> str:
    if cell.refused:
        return f"refused: {cell.refused[1]}"
    return f"exact, {cell.note}" if cell.note else "exact"


def page() -> str:
    lines = [f"| family | {' | '.join(KINDS)} |", "| --- " * (1 + len(KINDS)) + "|"]
    lines += [f"| {row.name} | {' | '.join(cell_text(row.cells[kind]) for kind in KINDS)} |" for row in TABLE]
    totals = ", ".join(f"{kind} {sum(not row.cells[kind].refused for row in TABLE)}" for kind in KINDS)
    return TEXT.format(count=len(TABLE), table="\n".join(lines), totals=totals)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
