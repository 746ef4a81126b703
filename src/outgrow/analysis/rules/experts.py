"""Mixtures of experts as one grouped product: rows are sorted by expert, and each is multiplied by its expert's weight.

    y[s, o] = Σ over i of x[s, i]·w[e(s), i, o]

Every expert reads and writes the same units, so a unit is one row or column of all experts. The experts themselves are chosen
by data: their number can't grow.
"""

from __future__ import annotations

from outgrow.analysis.effects import Ignore
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import reduce
from outgrow.analysis.rules.product import contract
from outgrow.trace.operators import Op


def grouped_mm(reading: Reading, op: Op) -> Outcome:
    """(x, weight, offsets): x is (rows, in), weight (experts, in, out)."""
    x, weight = op.args[:2]
    shapes = reading.shape(x), reading.shape(weight)
    if (len(shapes[0]), len(shapes[1])) != (2, 3):
        reading.pin_all([x, weight], f"{op.name} groups its axes in a way that has no rule", op)
        return Outcome(((),), Ignore())
    layout = reading.layout(weight)
    reading.pin(layout, [0], "experts are chosen by data", op)
    own = reduce(reading.ties, layout, [0], keepdim=True)
    left, right = (x, reading.layout(x), [0, 1], shapes[0]), (weight, own, [3, 1, 2], shapes[1])
    joint, effect = contract(reading, op, left, right, [0, 2])
    return Outcome((joint,), effect)


RULES = {"aten._grouped_mm": grouped_mm, "transformers.grouped_mm_fallback": grouped_mm}
