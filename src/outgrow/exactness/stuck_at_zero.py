"""Can new units that start at zero learn? Where they can't, zero writers are exact but useless.

Let x = ψ(U z) be read by A, with U = 0. The gradient of U is ∂L/∂U = ψ′(0)·Aᵀδ zᵀ, and that of A is zero while x is. There are
three obstacles:

    ψ′(0) = 0 (ReLU, ‖x − c‖)   the gradient of U is zero, and x stays zero
    x = u·v with u = v = 0      (q·k of a new head, a gate and its input): each has a zero gradient while the other is zero
    a batch norm before A       the first small values get unit variance: random one step later, unless a ReLU keeps them stuck
"""

from __future__ import annotations

import torch

from outgrow.analysis.effects import Contract, Effect, Folded, Map, Normalise, PerUnit, Power, Reduce
from outgrow.analysis.unit_states import State
from outgrow.exactness.carried_units import Findings
from outgrow.trace.evaluate_operator import evaluated
from outgrow.trace.operators import Op, refs_in


def slope_at_zero(op: Op) -> float:
    """The derivative of an activation at zero, by autograd; 1 if it is not elementwise (pooling)."""
    x = torch.zeros(1, requires_grad=True)
    try:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(evaluated(op, x).sum(), x)
    except (RuntimeError, IndexError):
        return 1.0
    return float(slope)


def why_stuck(findings: Findings) -> str:
    """Why zeros at the writers would stay zero or jump; empty if they can learn. The walk has started with zeros and ended."""
    dead: dict[int, str] = {}  # values through which no gradient reaches the writers, with the reason
    read: list[str] = []  # for each reader, why no gradient passes it
    jump = ""  # why they would not stay small
    for index in findings.places.anatomy.ops_of[findings.places.volume.name]:
        op, effect = findings.reading.trace.ops[index], findings.reading.effects[index]
        values = [ref.value for ref in refs_in((op.args, op.kwargs)) if not findings.reading.constant[ref.value]]
        zeros = [value for value in values if value in findings.known and findings.known[value].state is State.ZERO]
        place = op.module or "the model"
        if isinstance(effect, Contract):
            sides = [side for side in (effect.left, effect.right) if not findings.reading.constant[side.value]]
            if any(findings.places.axes(side.layout) & effect.contracted for side in sides):
                read += [dead.get(side.value, "") for side in sides]
                continue
            if len(set(zeros)) == 2:
                return f"two activations are multiplied in {place}: if both were zero, neither would learn"
        if not zeros:
            continue
        if isinstance(effect, Folded):  # it adds new units to existing ones
            read += [dead.get(effect.input, "")]
            continue
        if isinstance(effect, Normalise) or (isinstance(effect, PerUnit) and effect.shifts):
            jump = jump or f"the norm {place} would scale the first small values up to unit variance, one step after the growth"
        sums = isinstance(effect, Reduce) and bool(findings.places.axes(findings.reading.layouts[effect.input]) & effect.axes)
        if _flat(op, effect, zeros):
            reason = f"the slope of {op.name} at zero is zero, so no gradient would pass it ({place})"
            dead.update(dict.fromkeys(op.outputs, reason))
        elif all(value in dead for value in zeros):
            dead.update(dict.fromkeys(op.outputs, dead[zeros[0]]))
        if sums:  # its result carries no unit: nothing after it reads them
            read += [dead.get(op.outputs[0], "")]
    return read[0] if read and all(read) else jump


def _flat(op: Op, effect: Effect, zeros: list[int]) -> bool:
    """Whether small changes of zeros do not change the result (to first order)."""
    if isinstance(effect, Map) and effect.zero and len(effect.inputs) == 1:
        return slope_at_zero(op) == 0
    square = isinstance(effect, Contract) and len(zeros) == 2
    norm = isinstance(effect, Reduce) and effect.how == "norm"
    return square or norm or (isinstance(effect, Power) and effect.exponent > 1)
