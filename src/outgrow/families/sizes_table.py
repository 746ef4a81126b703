"""The table of a family's sizes, which `print(family)` shows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from outgrow.growth_plan.plan import Plan
from outgrow.text.tables import table

SHOWN = 3  # volumes named for one size


def sizes_table(parameters: Sequence[int], flops: Sequence[int], growths: Sequence[Sequence[Plan]]) -> str:
    """One row per size, the smallest first. growths: the plans that lead to each size from the one before."""
    columns = zip(_with_factors(parameters), _with_factors(flops), map(_changes, growths), strict=True)
    rows = [(str(number), *cells) for number, cells in enumerate(columns)]
    return table(("member", "parameters", "FLOPs", "grown by"), rows)


def _with_factors(values: Sequence[int]) -> list[str]:
    """Values, each with its ratio to the one before.

    Example:
        >>> _with_factors([10, 15])
        ['10', '15 (× 1.50)']
    """
    factors = ["", *(f" (× {value / max(before, 1):.2f})" for before, value in pairwise(values))]
    return [f"{value:,}{factor}" for value, factor in zip(values, factors, strict=True)]


def _changes(plans: Sequence[Plan]) -> str:
    changes = [f"{change.row[0]}: {change.row[1]}" for plan in plans for change in plan.changes]
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return ", ".join(changes[:SHOWN]) + more or "–"
