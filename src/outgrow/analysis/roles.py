"""What each parameter axis does to the units it belongs to: writes them, scales them, or reads them.

In Σₖ w[o, k]·x[k] the axis o writes and k reads; a factor or variance per unit scales; summands write. A tied tensor may both
write and read.

A product of two constants (learned queries and a weight, the two factors of an adapter) has a reader too: the side that is
closer to a stored tensor. The other side is an activation that happens to depend on no input. The role of the product is
decided where it is used: its rows and its bias have the role of the result.

A view that merges two axes of a parameter (heads and their features) gives new labels, to which those of the axes are bound:
both axes then have the role of the merged one.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from outgrow.analysis.effects import Contract, Move, Normalise, Operand, PerUnit, Scale, Sum
from outgrow.analysis.interpret_trace import Reading
from outgrow.analysis.labels import Labels, Layout, renumber
from outgrow.trace.operators import Op

WRITES, SCALES, READS, SHIFTS = "writes", "scales", "reads", "shifts"


def find_roles(reading: Reading) -> dict[tuple[str, int], set[str]]:
    """(tensor, axis) → roles."""
    roles: dict[tuple[str, int], set[str]] = defaultdict(set)
    origins = reading.ties.origins
    starts = np.array([origin.start for origin in origins], dtype=np.int64)
    ends = starts + np.array([origin.size for origin in origins], dtype=np.int64)
    births = int(ends[-1]) if len(ends) else 0
    merged = _merged_axes(reading, starts, births)
    named = [value for value in reading.trace.values if value.name]
    whole: dict[int, tuple[str, int]] = {
        id(block.labels): (value.name, block.axes[0]) for value in named for block in reading.layouts[value.index]
    }

    sums: list[tuple[Layout, ...]] = []  # sums of constants: all summands have the role of the first one on their axes

    def born(labels: Labels) -> list[tuple[str, int]]:
        if id(labels) in whole:  # a whole parameter axis: no search needed
            return [whole[id(labels)]]
        found = np.searchsorted(starts, labels.ravel(), side="right") - 1
        here = np.unique(found[labels.ravel() < ends[found]]).tolist()
        if len(merged) and labels.max() >= births:
            here += np.unique(merged[np.isin(merged[:, 0], labels), 1]).tolist()
        return [(origins[index].tensor, origins[index].axis) for index in here]

    def note(labels: Labels, role: str) -> None:
        for key in born(labels):
            roles[key].add(role)

    def note_value(value: int, role: str) -> None:
        for block in reading.layouts[value]:
            note(block.labels, role)

    def note_weight(mine: Operand, other: Operand, contracted: frozenset[int], constant: bool) -> None:
        met = {axis for block in other.layout for axis in block.axes}
        for block in mine.layout:
            if set(block.axes) & contracted:
                note(block.labels, READS)
            elif set(block.axes) <= met:
                note(block.labels, SCALES)
            elif not constant:
                note(block.labels, WRITES)

    for op, effect in zip(reading.trace.ops, reading.effects, strict=True):
        match effect:
            case Move():
                moved_by_data = not all(reading.constant[output] for output in op.outputs)
                for value in effect.inputs:
                    if reading.constant[value] and moved_by_data:  # looked up by data, or concatenated with data
                        note_value(value, WRITES)
            case Contract():
                constant = all(reading.constant[output] for output in op.outputs)
                weight = _factor(effect) if constant and not effect.contracted else weight_of(reading, effect)
                if weight is not None:
                    note_weight(weight, effect.left if weight is effect.right else effect.right, effect.contracted, constant)
                if effect.bias is not None and constant:
                    sums.append((reading.layouts[op.outputs[0]], _bias_layout(reading, op, effect.bias)))
                elif effect.bias is not None and reading.constant[effect.bias]:
                    note_value(effect.bias, WRITES)
            case Sum() if all(reading.constant[output] for output in op.outputs):
                sums.append(tuple(side.layout for side in effect.inputs))
            case Sum():
                for side in effect.inputs:
                    if reading.constant[side.value]:
                        note_value(side.value, WRITES)
            case PerUnit():
                for value in effect.scales:
                    note_value(value, SCALES)
                for value in effect.shifts:
                    note_value(value, SHIFTS)
            case Normalise():
                if effect.gamma is not None:
                    note_value(effect.gamma.value, SCALES)
                if effect.beta is not None:
                    note_value(effect.beta.value, SHIFTS)
    for layouts in reversed(sums):
        leaders = {block.axes: block for layout in reversed(layouts) for block in layout}
        for block in (block for layout in layouts for block in layout if block is not leaders[block.axes]):
            for role in {role for key in born(leaders[block.axes].labels) for role in roles.get(key, ())}:
                note(block.labels, role)
    return roles


def _merged_axes(reading: Reading, starts: Labels, births: int) -> Labels:
    """Rows of a label that a view made when it merged axes, and the number of a parameter's axis that is bound to it."""
    rows = [np.zeros((0, 2), dtype=np.int64)]
    for slices, grid, axis in reading.ties.bindings:
        if slices.max() < births <= grid.min():
            cells = np.moveaxis(grid, axis, 0).reshape(len(slices), -1)
            owners = np.searchsorted(starts, slices, side="right") - 1
            rows.append(np.stack([cells.ravel(), np.repeat(owners, cells.shape[1])], axis=1))
    return np.unique(np.concatenate(rows), axis=0)


def measuring_side(reading: Reading, effect: Contract) -> Operand | None:
    """The side of a product that measures the other side: buffers that are multiplied with a weight. None if there is none.

    Example: a spectral norm σ = uᵀ·W·v, with u and v in buffers.
    """
    if not effect.contracted or not all(reading.constant[side.value] for side in (effect.left, effect.right)):
        return None
    made = [_made_of_buffers(reading, side.value) for side in (effect.left, effect.right)]
    return {(True, False): effect.left, (False, True): effect.right}.get((made[0], made[1]))


def _made_of_buffers(reading: Reading, value: int) -> bool:
    """Whether a value is computed from buffers alone."""
    todo, found = [value], False
    while todo:
        source = reading.trace.values[todo.pop()]
        if source.name and source.kind != "buffer":
            return False
        found |= bool(source.name)
        if not source.name and source.index in reading.maker:
            todo.extend(ref.value for ref in reading.maker[source.index].refs)
    return found


def weight_of(reading: Reading, effect: Contract) -> Operand | None:
    """The side of a product that is a weight; None if there is none.

    Of two constants that are summed over: the side closer to a stored tensor. Otherwise the second, unless it is larger.
    """
    gauge = measuring_side(reading, effect)
    if gauge is not None:
        return gauge
    constant = [reading.constant[side.value] for side in (effect.left, effect.right)]
    if all(constant) and effect.contracted:
        left, right = (_distance(reading, side.value) for side in (effect.left, effect.right))
        if left != right:
            return effect.left if left < right else effect.right
    if constant[1] and not (constant[0] and _larger(reading, effect.right, effect.left)):
        return effect.right
    return effect.left if constant[0] else None


def _distance(reading: Reading, value: int) -> int:
    """How far a constant is from stored tensors: 0 for a stored tensor (moved, scaled), 1 for linear functions, 2 otherwise."""
    steps = {Move: 0, Scale: 0, Sum: 1, Contract: 1}
    todo, seen, most = [value], set[int](), 0
    while todo:
        value = todo.pop()
        op = reading.maker.get(value)
        if op is None or value in seen or reading.trace.values[value].name:
            continue
        seen.add(value)
        most = max(most, steps.get(type(reading.effects[op.index]), 2))
        todo.extend(ref.value for ref in op.refs)
    return most


def leader_of(effect: Contract) -> Operand:
    """The factor whose labels an elementwise product of two constants carries."""
    widest = [max((len(block.axes) for block in side.layout), default=0) for side in (effect.left, effect.right)]
    return effect.left if widest[0] >= widest[1] else effect.right


def _factor(effect: Contract) -> Operand:
    """The side that scales the other."""
    return effect.right if leader_of(effect) is effect.left else effect.left


def _bias_layout(reading: Reading, op: Op, bias: int) -> Layout:
    """The layout of a bias over the axes of the result to which it is added."""
    ranks = [len(reading.trace.values[value].shape) for value in (op.outputs[0], bias)]
    first = 1 if op.name == "aten.convolution" else ranks[0] - ranks[1]
    return renumber(reading.layouts[bias], lambda axis: axis + first)


def _larger(reading: Reading, one: Operand, other: Operand) -> bool:
    sizes = [np.prod(reading.trace.values[side.value].shape, dtype=np.int64) for side in (one, other)]
    return bool(sizes[0] > sizes[1])
