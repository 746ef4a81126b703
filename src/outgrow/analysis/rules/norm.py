"""Normalisations. Batch and instance norm treat each unit alone; layer norm mixes the units; group norm mixes within groups.

Weight standardisation (NFNet) is batch norm in training mode over a weight: statistics over the columns of a reader.
"""

from __future__ import annotations

from outgrow.analysis.effects import Effect, Normalise, Operand, PerUnit
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Layout, renumber, reshape
from outgrow.trace.operators import Op, Ref


def batch_norm(reading: Reading, op: Op) -> Outcome:
    """(x, weight, bias, running mean, running variance, training, …): one value per channel each."""
    x, *vectors = op.args[:5]
    shape = reading.shape(x)
    present = [ref if isinstance(ref, Ref) else None for ref in vectors]
    operands = [(x, reading.layout(x), {1: shape[1]})]
    for ref in present:
        if ref is not None:
            operands.append((ref, renumber(reading.layout(ref), lambda axis: axis + 1), {1: shape[1]}))
    layout = reading.meet(op, operands, shape)
    weight, bias, mean, variance = present
    legit = op.name == "aten._native_batch_norm_legit_no_training"
    training = not legit and bool(op.args[5])
    eps = float(op.args[6] if legit else op.args[7])
    others = frozenset(axis for axis in range(len(shape)) if axis != 1)
    effect: Effect
    if training and any(set(block.axes) & others for block in reading.layout(x)):
        sides = [_beside(reading, ref) for ref in (weight, bias)]
        effect = Normalise(reading.operand(x), others, sides[0], sides[1], eps)
    else:
        scales = tuple(ref.value for ref in (weight, variance) if ref is not None)
        shifts = tuple(ref.value for ref in (bias, mean) if ref is not None)
        effect = PerUnit(x.value, scales, shifts)
    return Outcome((layout,), effect)


def _beside(reading: Reading, ref: Ref | None) -> Operand | None:
    return None if ref is None else Operand(ref.value, renumber(reading.layout(ref), lambda axis: axis + 1))


def layer_norm(reading: Reading, op: Op) -> Outcome:
    x, normal, weight, bias, eps = op.args[:5]
    shape = reading.shape(x)
    start = len(shape) - len(normal)
    axes = frozenset(range(start, len(shape)))
    operands = [(x, reading.layout(x), {axis: shape[axis] for axis in axes})]
    sides: list[Operand | None] = []
    for ref in (weight, bias):
        if isinstance(ref, Ref):
            spread = renumber(reading.layout(ref), lambda axis: axis + start)
            operands.append((ref, spread, {axis: shape[axis] for axis in axes}))
            sides.append(Operand(ref.value, spread))
        else:
            sides.append(None)
    layout = reading.meet(op, operands, shape)
    return Outcome((layout,), Normalise(reading.operand(x), axes, sides[0], sides[1], float(eps)))


def group_norm(reading: Reading, op: Op) -> Outcome:
    """(x, weight, bias, N, C, HxW, groups, eps): statistics over the channels of a group and all positions."""
    x, weight, bias, _, channels, _, groups, eps = op.args[:8]
    shape = reading.shape(x)
    operands = [(x, reading.layout(x), {1: channels})]
    for ref in (weight, bias):
        if isinstance(ref, Ref):
            operands.append((ref, renumber(reading.layout(ref), lambda axis: axis + 1), {1: channels}))
    layout = reading.meet(op, operands, shape)
    wide = (shape[0], groups, channels // groups, *shape[2:])

    def grouped(refs_layout: Layout) -> Layout:
        result = reshape(reading.ties, refs_layout, shape, wide)
        for block in result:
            if len(block.axes) > 1:
                reading.ties.grid(block.labels)
        return result

    grouped_x = grouped(reading.layout(x))
    sides = [
        Operand(ref.value, grouped(renumber(reading.layout(ref), lambda axis: axis + 1))) if isinstance(ref, Ref) else None
        for ref in (weight, bias)
    ]
    axes = frozenset(range(2, len(wide)))
    return Outcome((layout,), Normalise(Operand(x.value, grouped_x), axes, sides[0], sides[1], float(eps)))


RULES = {
    "aten.native_batch_norm": batch_norm,
    "aten._native_batch_norm_legit_no_training": batch_norm,
    "aten.native_layer_norm": layer_norm,
    "aten.native_group_norm": group_norm,
}
