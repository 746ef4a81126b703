"""Predict the shape of every tensor in the forward pass of the grown model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.effects import Contract, Normalise
from outgrow.analysis.labels import Labels, Layout, block_at
from outgrow.analysis.volumes import Anatomy
from outgrow.configuration.library_build import scalar_of
from outgrow.trace.operators import Op
from outgrow.transforms.widen.make_plan import Choice


class Prediction:
    """Shapes after a growth, computed from the labels alone."""

    def __init__(self, anatomy: Anatomy, choices: Sequence[Choice]) -> None:
        self.anatomy, self.choices = anatomy, choices
        self._gains: dict[int, tuple[int, ...]] = {}
        chosen = {choice.volume.name: choice for choice in choices}
        self._by_number = {number: chosen[v.name] for number, v in enumerate(anatomy.volumes) if v.name in chosen}

    def _gain(self, labels: Labels) -> tuple[int, ...]:
        """The number of entries that each axis of a block gains."""
        key = id(labels)
        if key not in self._gains:
            gains = [0] * labels.ndim
            for choice in (self._by_number[n] for n in self.anatomy.volumes_by_label.of(labels) if n in self._by_number):
                ids = self.anatomy.units(choice.volume, labels)
                grows, new = _gaining(choice, ids)
                for position in range(ids.ndim):
                    if not (ids == ids.take([0], axis=position)).all():
                        others = tuple(a for a in range(ids.ndim) if a != position)
                        gains[position] += new * int(grows.any(axis=others).sum())
            self._gains[key] = tuple(gains)
        return self._gains[key]

    def shape(self, value: int) -> tuple[int, ...]:
        reading = self.anatomy.reading
        return self.shape_of((*reading.layouts[value], *reading.expanded.get(value, ())), reading.trace.values[value].shape)

    def shape_of(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        new = list(shape)
        for block in layout:
            for axis, gain in zip(block.axes, self._gain(block.labels), strict=True):
                new[axis] += gain
        return tuple(new)

    def padding(self, op: Op) -> list[int]:
        """The amounts by which an operator must pad in the grown model: new units follow the last unit of their volume."""
        amounts = [int(amount) for amount in op.args[1]]
        (output,) = op.outputs
        rank = len(self.anatomy.reading.trace.values[output].shape)
        for index in range(len(amounts) // 2):
            host = block_at(self.anatomy.reading.layouts[output], rank - 1 - index)
            before, after = amounts[2 * index : 2 * index + 2]
            if host is not None and len(host.axes) == 1 and min(before, after) >= 0:
                amounts[2 * index] += self._added(host.labels[:before])
                amounts[2 * index + 1] += self._added(host.labels[len(host.labels) - after :])
        return amounts

    def _added(self, labels: Labels) -> int:
        """The number of positions that a run of labels gains."""
        gaining = (_gaining(choice, self.anatomy.units(choice.volume, labels)) for choice in self.choices)
        return sum(new * int(grows.sum()) for grows, new in gaining)

    @cached_property
    def eps(self) -> dict[int, tuple[float, float]]:
        """For each operator whose ε changes, or whose factor the library changes: the scalar before and after."""
        result: dict[int, tuple[float, float]] = {}
        for choice in self.choices:
            for move in choice.verdict.eps:
                old, now = result.get(move.op, (move.eps, move.eps))
                result[move.op] = old, now * move.ratio(choice.new) ** float(move.exponent)
            for index, exponent in choice.verdict.scalars.items():
                scalar = scalar_of(self.anatomy.reading.trace.ops[index])
                if scalar is not None:
                    ratio = choice.volume.count / (choice.volume.count + choice.new)
                    result[index] = scalar, scalar * float(ratio ** float(exponent))
        return result

    @cached_property
    def scalars(self) -> dict[int, tuple[float, float]]:
        """For each operator whose scalar follows the size of a head: its values before and after."""
        return {
            scalar.op: (scalar.value, scalar.after(scores.ratio(choice.new)))
            for choice in self.choices
            for scores in choice.verdict.scores
            for scalar in scores.scalars
        }

    def groups(self, index: int) -> tuple[int, int] | None:
        """Groups of a grouped convolution or group norm, before and after."""
        op, effect = self.anatomy.reading.trace.ops[index], self.anatomy.reading.effects[index]
        if op.name == "aten.convolution" and isinstance(effect, Contract):
            old, layout = op.args[8], effect.left.layout
        elif op.name == "aten.native_group_norm" and isinstance(effect, Normalise):
            old, layout = op.args[6], effect.input.layout
        else:
            return None
        rank = 1 + max([1, *(axis for block in layout for axis in block.axes)])
        return old, self.shape_of(layout, [old] * rank)[1]


def _gaining(choice: Choice, ids: Labels) -> tuple[NDArray[np.bool_], int]:
    """The positions behind which new units lie, and how many behind each of them."""
    if choice.spaced:
        return ids >= 0, choice.new // choice.volume.count
    return ids == choice.volume.count - 1, choice.new
