"""Products with a sparse matrix: A·x over the nodes of a graph.

For units, a sparse matrix is like a dense one. Its axes are nodes, whose number is that of the data; a parameter inside it is
refused where the matrix is made, since that operator has no rule.
"""

from __future__ import annotations

from dataclasses import replace

from outgrow.analysis.effects import Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.rules.product import mm
from outgrow.trace.operators import Op, refs_in


def sparse_addmm(reading: Reading, op: Op) -> Outcome:
    """(base, sparse, dense): base + sparse·dense. `torch.sparse.mm` passes zeros as the base."""
    base, *factors = refs_in(op.args)
    return mm(reading, replace(op, args=tuple(factors)) if reading.zeros[base.value] else op)


def sparse_mm_reduce(reading: Reading, op: Op) -> Outcome:
    """(sparse, dense, how): sums, means or extremes over the neighbours of a node, every unit alike."""
    outcome = mm(reading, replace(op, args=op.args[:2], outputs=op.outputs[:1]))
    dense, how = op.args[1].value, op.args[2]
    effect = Move((dense,)) if how in ("sum", "mean") else Map((dense,), zero=True, homogeneous=True)
    return Outcome(outcome.layouts * len(op.outputs), effect)


RULES = {
    "aten._sparse_mm": mm,
    "aten._sparse_addmm": sparse_addmm,
    "aten._sparse_mm_reduce_impl": sparse_mm_reduce,
}
