"""Can new units that begin at zero leave it? Where they can't, zero writers are exact and useless.

Let x = ψ(U z) be read by A, with U = 0. What reaches U is ∂L/∂U = ψ′(0)·Aᵀδ zᵀ, and A waits for x. So three things end it:

    ψ′(0) = 0 (ReLU)            nothing reaches U, and x stays zero
    x = u·v with u = v = 0      (q·k of a new head, a gate and what it gates): each waits for the other
    a batch norm before A       whatever leaves zero has unit variance at once: not stuck, but random one step later
"""

from __future__ import annotations

import torch

from outgrow.analysis.effects import Contract, Effect, Map, Normalise, PerUnit, Power
from outgrow.analysis.unit_states import State
from outgrow.exactness.carried_units import Findings
from outgrow.trace.evaluate_operator import evaluated
from outgrow.trace.operators import Op, refs_in


def slope_at_zero(op: Op) -> float:
    """The derivative of an activation at zero, as autograd has it; one where it is no function of single numbers (pooling)."""
    x = torch.zeros(1, requires_grad=True)
    try:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(evaluated(op, x).sum(), x)
    except (RuntimeError, IndexError):
        return 1.0
    return float(slope)


def why_stuck(findings: Findings) -> str:
    """Why zeros at the writers would stay zero, or leap; empty if they can learn. The walk began with zeros, and is done."""
    dead: dict[int, str] = {}  # values through which nothing reaches the writers
    read: list[str] = []  # for each reader, why nothing passes it
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
                return f"two activations are multiplied in {place}: were both zero, neither would learn"
        if not zeros:
            continue
        if isinstance(effect, Normalise) or (isinstance(effect, PerUnit) and effect.shifts):
            return f"behind zeros the norm {place} makes large numbers of the first small ones, one step after the growth"
        if _flat(op, effect, zeros):
            dead.update(dict.fromkeys(op.outputs, f"{op.name} is flat at zero, so that no gradient would pass it ({place})"))
        elif all(value in dead for value in zeros):
            dead.update(dict.fromkeys(op.outputs, dead[zeros[0]]))
    return read[0] if read and all(read) else ""


def _flat(op: Op, effect: Effect, zeros: list[int]) -> bool:
    """Whether small changes of zeros change nothing."""
    if isinstance(effect, Map) and effect.zero and len(effect.inputs) == 1:
        return slope_at_zero(op) == 0
    square = isinstance(effect, Contract) and len(zeros) == 2
    return square or (isinstance(effect, Power) and effect.exponent > 1)
