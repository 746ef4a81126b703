"""Fake quantisation: q(x) = s·(clamp(round(x/s) + z) − z), value by value.

With a fixed scale s this is an elementwise function with q(0) = 0. It is not linear, so the new columns of a quantised reader
can be zero or free, but can neither cancel nor be shared out. An active observer sets s by the range of all values, which new
values would widen; one scale per channel comes with an integer z per channel, which does not grow.
"""

from __future__ import annotations

from outgrow.analysis.effects import Effect, Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.trace.operators import FAKE_QUANTISE, OBSERVING, Op


def per_tensor(reading: Reading, op: Op) -> Outcome:
    """(x, scale, zero point, …): one scale for all; also returns a mask of the values that were not clamped."""
    value = op.args[0].value
    return Outcome((reading.layouts[value],) * len(op.outputs), Map((value,), zero=True))


def per_channel(reading: Reading, op: Op) -> Outcome:
    """(x, scales, zero points, axis, …)."""
    return _by_channel(reading, op, op.args[3])


def observed(reading: Reading, op: Op) -> Outcome:
    """(x, …, quantisation range, axis, per channel, …): an observer and fake quantisation as one operator."""
    if op.kwargs[OBSERVING]:
        reason = (
            "an observer sets the scale of its quantisation by the range of all its values "
            "(switch it off: model.apply(torch.ao.quantization.disable_observer))"
        )
        reading.pin_all([op.args[0]], reason, op)
        effect: Effect = Move((op.args[0].value,))
        return Outcome(((),) * len(op.outputs), effect)
    by_channel = len(op.args) > 11 and op.args[11]
    return _by_channel(reading, op, op.args[10]) if by_channel else per_tensor(reading, op)


def _by_channel(reading: Reading, op: Op, axis: int) -> Outcome:
    layout = reading.layout(op.args[0])
    reading.pin(layout, [axis % len(reading.shape(op.args[0]))], "it is quantised with an integer zero point per channel", op)
    return per_tensor(reading, op)


RULES = {
    "aten.fake_quantize_per_tensor_affine_cachemask": per_tensor,
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams": per_tensor,
    "aten.fake_quantize_per_channel_affine_cachemask": per_channel,
    FAKE_QUANTISE: observed,
}
