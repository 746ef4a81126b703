"""Fourier transforms over space, and complex numbers.

A transform is linear, and treats all units alike if it runs over spatial axes only. A complex unit is one unit: where the code
separates real and imaginary parts, they lie on an axis of size two that carries no unit.
"""

from __future__ import annotations

from outgrow.analysis.effects import Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import reduce
from outgrow.analysis.rules.elementwise import broadcast
from outgrow.trace.operators import Op, refs_in


def transform(reading: Reading, op: Op) -> Outcome:
    """(x, axes, …): to frequencies or back, over these axes."""
    ref = op.args[0]
    rank = len(reading.shape(ref))
    return _without(reading, op, [axis % rank for axis in op.args[1]], "a Fourier transform runs over it")


def to_pairs(reading: Reading, op: Op) -> Outcome:
    """Complex numbers as pairs of real ones, on a new last axis."""
    ref = op.args[0]
    return Outcome((reading.layout(ref),), Move((ref.value,)), reading.uniform[ref.value])


def from_pairs(reading: Reading, op: Op) -> Outcome:
    """Pairs of real numbers, on the last axis, as complex ones."""
    last = len(reading.shape(op.args[0])) - 1
    return _without(reading, op, [last], "its indices are real and imaginary parts")


def from_parts(reading: Reading, op: Op) -> Outcome:
    """Complex numbers from real and imaginary parts."""
    refs = refs_in(op.args)
    layout, _ = broadcast(reading, op, refs)
    return Outcome((layout,), Map(tuple(ref.value for ref in refs), zero=True, homogeneous=True))


def _without(reading: Reading, op: Op, axes: list[int], reason: str) -> Outcome:
    ref = op.args[0]
    reading.pin(reading.layout(ref), axes, reason, op)
    return Outcome((reduce(reading.ties, reading.layout(ref), axes, keepdim=True),), Move((ref.value,)))


RULES = {
    **{f"aten.{name}": transform for name in ("_fft_r2c", "_fft_c2r", "_fft_c2c")},
    "aten.view_as_real": to_pairs,
    "aten.view_as_complex": from_pairs,
    "aten.complex": from_parts,
}
