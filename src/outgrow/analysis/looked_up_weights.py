"""Weights that data looks up in stacks of weights: y[s, o] = Σ over i of W[e(s), o, i]·x[s, i].

Some mixtures of experts copy the weight of each row's expert out of the stack, and multiply row by row. Such a copy depends on
the input, so the product would count as one of two activations. As one operator with the stack, the product reads units as a
layer does: whichever expert is chosen, a unit's columns lie at the same place of W, and new ones cancel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outgrow.analysis.effects import Contract, Fused, Move, Operand

if TYPE_CHECKING:
    from outgrow.analysis.interpret_trace import Reading

Users = Mapping[int, Sequence[int]]  # value → operators that read it


def fuse_lookups(reading: Reading) -> None:
    """Let products that sum over units of looked-up weights read the whole stack."""
    users: dict[int, list[int]] = defaultdict(list)
    for op in reading.trace.ops:
        for ref in op.refs:
            users[ref.value].append(op.index)
    for op in reading.trace.ops:
        stack = _stack(reading, op.index)
        if stack is not None:
            _fuse(reading, users, op.index, stack)


def _stack(reading: Reading, index: int) -> int | None:
    """The stack of weights, with two axes besides the leading one, from which an operator takes those that data chooses."""
    op, effect = reading.trace.ops[index], reading.effects[index]
    if op.name == "aten.index":
        leading = all(item is None for item in op.args[1][1:])
    else:
        leading = op.name == "aten.index_select" and op.args[1] in (0, -3)
    if not leading or not isinstance(effect, Move) or reading.constant[op.outputs[0]]:
        return None
    stack: int = op.args[0].value
    return stack if reading.constant[stack] and len(reading.trace.values[stack].shape) == 3 else None


def _fuse(reading: Reading, users: Users, lookup: int, stack: int) -> None:
    """Fuse a lookup and the views of its result with the products; nothing changes if the result has other uses."""
    moves, products = [lookup], list[int]()
    copies = set(reading.trace.ops[lookup].outputs)
    todo = list(copies)
    while todo:
        value = todo.pop()
        for index in users[value]:
            if _moves(reading, index):
                moves.append(index)
                copies.update(reading.trace.ops[index].outputs)
                todo.extend(reading.trace.ops[index].outputs)
            else:
                products.append(index)
    fused = {index: _with_stack(reading, index, copies, stack) for index in products}
    if copies.isdisjoint(reading.trace.outputs) and all(fused.values()):
        reading.effects = [fused.get(index) or effect for index, effect in enumerate(reading.effects)]
        for index in moves:
            reading.effects[index] = Fused()


def _moves(reading: Reading, index: int) -> bool:
    effect = reading.effects[index]
    return isinstance(effect, Move) and len(effect.inputs) == 1


def _with_stack(reading: Reading, index: int, copies: set[int], stack: int) -> Contract | None:
    """A product of a looked-up weight and an activation that sums over axes, with the stack as its weight; None for others."""
    effect = reading.effects[index]
    if not isinstance(effect, Contract) or not effect.contracted or effect.bias in copies:
        return None
    sides = effect.left, effect.right
    others = [side for side in sides if side.value not in copies]
    if len(others) != 1 or reading.constant[others[0].value]:
        return None
    left, right = (side if side in others else Operand(stack, side.layout) for side in sides)
    return replace(effect, left=left, right=right)
