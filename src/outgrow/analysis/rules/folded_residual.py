"""The folded residual as one operator: it reads one volume and writes another, whose sizes do not depend on each other."""

from __future__ import annotations

from outgrow.analysis.effects import Folded, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Block, block_at
from outgrow.trace.operators import FOLD, Op


def fold(reading: Reading, op: Op) -> Outcome:
    """(x̄, axis): the axis gets new labels, the others keep theirs."""
    ref, axis = op.args
    layout = reading.layout(ref)
    host = block_at(layout, axis)
    if host is None:
        return Outcome((layout,), Move((ref.value,)))
    rest = tuple(block for block in layout if block is not host)
    size = reading.trace.values[op.outputs[0]].shape[axis]
    if len(host.axes) > 1:
        reading.ties.fix(host.labels, "a folded residual spans several of its axes", op.module)
        return Outcome((rest,), Folded(ref.value))
    fresh = (Block((axis,), reading.ties.fresh((size,))),) if size > 1 else ()
    return Outcome(((*rest, *fresh),), Folded(ref.value))


RULES = {FOLD: fold}
