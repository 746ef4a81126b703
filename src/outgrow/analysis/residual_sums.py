"""Residual sums: x + f(x), where f reads x by a weight; and p(x) + f(x), where p is one linear layer (a projection shortcut).

The units of such a sum are a stream: blocks read it and write into it. In a recurrent cell, the state is a stream.

A sum inside the branch f of another stream is no stream if it is the only one of its volume: the channels that a state-space
model carries past its recurrence, y + D·u, are hidden units of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outgrow.analysis.effects import Contract, Map, Operand, PerUnit, Power, Sum
from outgrow.analysis.labels import Layout
from outgrow.trace.operators import Op

if TYPE_CHECKING:
    from outgrow.analysis.volumes import Anatomy

SPLITTING = {"aten.slice", "aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.select", "aten.unbind"}
LINEAR, ACTIVATED, HIDDEN = (
    1,
    2,
    3,
)  # met on a way back: a product with a weight, then a nonlinearity, then a product


@dataclass(frozen=True)
class ResidualSum:
    """x + f(x): the sum, the volumes of x, and the operators of f.

    bare: those of the volumes that f writes and that x does not have, since its size comes from the model's input.
    source: the volumes of x in p(x) + f(x).
    """

    op: int
    volumes: frozenset[int]
    bare: frozenset[int]
    branch: frozenset[int]
    source: frozenset[int] = frozenset()


def find_residual_sums(anatomy: Anatomy, attention: Collection[int]) -> list[ResidualSum]:
    """All residual sums of streams, in order. attention: volumes of heads and their features, which are no streams."""
    walker = _Walker(anatomy)
    for op in anatomy.reading.trace.ops:
        effect = anatomy.reading.effects[op.index]
        if isinstance(effect, Sum) and len(effect.inputs) == 2 and not effect.minus:
            common = frozenset.intersection(*(_volumes(anatomy, side.layout) for side in effect.inputs)) - frozenset(attention)
            bare = frozenset(_bare(anatomy, effect.inputs)) - frozenset(attention)
            found = walker.residual(op, effect, common | bare) if common | bare else None
            if found is not None:
                walker.sums[op.index] = replace(found, bare=bare - common)
    return list(_without_nested(anatomy, list(walker.sums.values())))


def _without_nested(anatomy: Anatomy, sums: list[ResidualSum]) -> Iterator[ResidualSum]:
    end = anatomy.reading.trace.ends[0] if anatomy.reading.trace.ends else len(anatomy.reading.trace.ops)
    first_pass = [found for found in sums if found.op < end]
    times = Counter(volume for found in first_pass for volume in found.volumes)
    nested = {
        volume
        for found in first_pass
        for volume in found.volumes
        if times[volume] == 1 and any(found.op in outer.branch and volume not in outer.volumes for outer in first_pass)
    }
    for found in sums:
        if found.volumes - nested:
            yield replace(found, volumes=found.volumes - nested, bare=found.bare - nested)


def _volumes(anatomy: Anatomy, layout: Layout) -> frozenset[int]:
    return frozenset(number for block in layout for number in anatomy.volumes_by_label.of(block.labels))


def _bare(anatomy: Anatomy, sides: Sequence[Operand]) -> Iterator[int]:
    """Volumes of one summand on axes that have a size, but no labels, in the other."""
    for side, other in (sides, sides[::-1]):
        shape = anatomy.reading.trace.values[other.value].shape
        covered = {axis for block in other.layout for axis in block.axes}
        free = {axis for axis in range(-len(shape), 0) if shape[axis] > 1}
        rank = max(len(anatomy.reading.trace.values[one.value].shape) for one in sides)
        for block in side.layout:
            if covered.isdisjoint(block.axes) and all(axis - rank in free for axis in block.axes):
                yield from anatomy.volumes_by_label.of(block.labels)


class _Walker:
    """Walks backwards from the two summands of sums."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy, self.reading = anatomy, anatomy.reading
        self.maker, self.constant = anatomy.maker, anatomy.reading.constant
        self.sums: dict[int, ResidualSum] = {}  # by operator: those found so far

    def residual(self, op: Op, effect: Sum, volumes: frozenset[int]) -> ResidualSum | None:
        sides = [side.value for side in effect.inputs]
        if any(self.constant[value] for value in sides):
            return None
        origins = {value: self._origin(value, volumes) for value in sides}
        for skip, branch in (sides, sides[::-1]):
            level, ops = self._way(branch, origins[skip][0], through_sums=True)
            if level >= LINEAR:
                return ResidualSum(op.index, volumes, frozenset(), ops)
        for skip, branch in (sides, sides[::-1]):
            for product in origins[skip][1]:
                read = self.reading.effects[product.index]
                assert isinstance(read, Contract)
                (source,) = (side for side in (read.left, read.right) if not self.constant[side.value])
                carried = _volumes(self.anatomy, source.layout)
                level, ops = self._way(branch, self._origin(source.value, carried)[0], through_sums=False)
                if level >= HIDDEN:
                    return ResidualSum(op.index, volumes, frozenset(), ops, carried)
        return None

    def _origin(self, value: int, volumes: frozenset[int]) -> tuple[set[int], list[Op]]:
        """The values from which a value follows without a weight, and the products with weights that end the way.

        Sums of activations end it too, products of two activations that both have units of the volumes (gates), and operators
        that take a part of a tensor (the steps of a sequence are different values).
        """
        seen, products, todo = {value}, list[Op](), [value]
        while todo:
            op = self.maker.get(todo.pop())
            if op is None or op.name in SPLITTING:
                continue
            effect = self.reading.effects[op.index]
            if isinstance(effect, Sum) and not any(self.constant[side.value] for side in effect.inputs):
                continue
            if isinstance(effect, Contract):
                sides = [side for side in (effect.left, effect.right) if not self.constant[side.value]]
                if effect.contracted:
                    products += [op] if len(sides) == 1 else []
                    continue
                if len(sides) == 2 and all(_volumes(self.anatomy, side.layout) & volumes for side in sides):
                    continue
            new = [ref.value for ref in op.refs if not self.constant[ref.value] and ref.value not in seen]
            seen.update(new)
            todo.extend(new)
        return seen, products

    def _way(self, value: int, goals: set[int], through_sums: bool) -> tuple[int, frozenset[int]]:
        """What the ways back from a value to one of the goals meet (LINEAR, …; 0 for nothing, or no way); their operators."""
        floor = min((self.maker[goal].index if goal in self.maker else -1) for goal in goals)
        met = {value: 0}
        todo, reached, ops = [value], 0, set[int]()
        while todo:
            now = todo.pop()
            if now in goals:
                reached = max(reached, met[now])
                continue
            op = self.maker.get(now)
            if op is None or op.index < floor or (op.index in self.sums and not through_sums):
                continue
            ops.add(op.index)
            level = self._after(op, met[now])
            for ref in op.refs:
                if not self.constant[ref.value] and met.get(ref.value, -1) < level:
                    met[ref.value] = level
                    todo.append(ref.value)
        return reached, frozenset(ops)

    def _after(self, op: Op, level: int) -> int:
        effect = self.reading.effects[op.index]
        if isinstance(effect, Contract) and effect.contracted:
            return {0: LINEAR, ACTIVATED: HIDDEN}.get(level, level)
        return ACTIVATED if level == LINEAR and is_nonlinear(self.anatomy, op) else level


def is_nonlinear(anatomy: Anatomy, op: Op) -> bool:
    """Whether an operator is a nonlinear function of each value, or multiplies two activations."""
    effect = anatomy.reading.effects[op.index]
    if isinstance(effect, Contract):
        return not effect.contracted and not any(anatomy.reading.constant[side.value] for side in (effect.left, effect.right))
    return isinstance(effect, (Map, Power)) or (isinstance(effect, PerUnit) and not effect.shifts)  # PReLU, not batch norm
