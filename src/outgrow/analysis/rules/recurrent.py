"""Packed sequences: batches of different lengths, concatenated for a recurrent layer.

Packing moves rows; features stay where they are. Unpacking needs no rule of its own: torch writes the parts into a padded
tensor (see `analysis/rules/partial_write.py`), and the layers themselves run as elementary operators.
"""

from __future__ import annotations

from outgrow.analysis.effects import Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import reduce, renumber
from outgrow.trace.operators import Op


def pack(reading: Reading, op: Op) -> Outcome:
    """(x, lengths, batch first): (batch, steps, features) → (rows, features), and the number of rows of each step."""
    ref = op.args[0]
    reading.pin(reading.layout(ref), [0, 1], "it is a batch or time axis of packed sequences", op)
    kept = reduce(reading.ties, reading.layout(ref), [0, 1], keepdim=True)
    return Outcome((renumber(kept, lambda axis: axis - 1), ()), Move((ref.value,)))


RULES = {"aten._pack_padded_sequence": pack}
