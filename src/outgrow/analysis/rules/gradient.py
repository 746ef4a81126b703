"""`torch.autograd.grad` as one operator: if a function does not change, its gradient does not change."""

from __future__ import annotations

from outgrow.analysis.effects import Ignore
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.model.inner_gradients import GRADIENT
from outgrow.trace.operators import Op


def gradient(reading: Reading, op: Op) -> Outcome:
    """(outputs, inputs): exact if neither carries units. New units would add to a gradient that is summed over them."""
    outputs, inputs = op.args
    reading.pin_all(outputs, "torch.autograd.grad differentiates its sum over units", op)
    reading.pin_all(inputs, "torch.autograd.grad differentiates with respect to its units", op)
    for output in op.outputs:
        if not any(reading.layout(ref) for ref in (*outputs, *inputs)):
            reading.lost.pop(output, None)
    return Outcome(((),) * len(op.outputs), Ignore())


RULES = {GRADIENT: gradient}
