"""The entries of a shared parameter that belong to a smaller member.

A growth adds positions along axes of a tensor; the positions that remain, in order, are the smaller tensor:

    w_small = w_large[rows][:, columns]

Mostly these positions are the first ones, and the smaller tensor is a view without a copy (`narrow`). In a fused weight such as
[q; k; v], where each part has grown at its end, they are evenly spaced ranges; then, and in all other cases, it is a copy, made
in each pass. Autograd leads the gradient of either back to the shared parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outgrow.apply.final_positions import gapless_runs
from outgrow.errors import GrowthError
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.history.growth_order import undone

Positions = NDArray[np.int64]
OUTSIDE = "the largest member has grown outside the family: grow it with family.grow(transforms)"
Kept = Mapping[tuple[int, int], Positions]  # by id of the tensor, and axis


class Selection(Protocol):
    """Positions along one axis.

    of: the entries there. pair: views of a tensor and of values for these entries, of the same shape; None if there are none.
    """

    def of(self, tensor: Tensor, axis: int) -> Tensor: ...

    def pair(self, tensor: Tensor, values: Tensor, axis: int) -> tuple[Tensor, Tensor] | None: ...


@dataclass(frozen=True)
class Range:
    """Positions without a gap."""

    start: int
    length: int

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor.narrow(axis, self.start, self.length)

    def pair(self, tensor: Tensor, values: Tensor, axis: int) -> tuple[Tensor, Tensor] | None:
        return self.of(tensor, axis), values


@dataclass(frozen=True)
class EvenRanges:
    """Ranges of equal length at equal distances, which together cover the axis: one per part of a fused weight."""

    count: int
    period: int
    start: int
    length: int

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        return self._parts(tensor, axis).flatten(axis, axis + 1)

    def pair(self, tensor: Tensor, values: Tensor, axis: int) -> tuple[Tensor, Tensor] | None:
        return self._parts(tensor, axis), values.unflatten(axis, (self.count, self.length))

    def _parts(self, tensor: Tensor, axis: int) -> Tensor:
        parts: Tensor = tensor.unflatten(axis, (self.count, self.period))
        return parts.narrow(axis + 1, self.start, self.length)


@dataclass(frozen=True, eq=False)
class Listed:
    """Any other positions."""

    positions: Positions

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        if tensor.device not in self._indices:
            self._indices[tensor.device] = torch.from_numpy(self.positions).to(tensor.device)
        return tensor.index_select(axis, self._indices[tensor.device])

    def pair(self, tensor: Tensor, values: Tensor, axis: int) -> tuple[Tensor, Tensor] | None:
        return None

    @cached_property
    def _indices(self) -> dict[Any, Tensor]:
        return {}


def selection_of(positions: Positions, size: int) -> Selection:
    """The simplest form of some positions along an axis of this size.

    Example:
        >>> selection_of(np.arange(4), 6)
        Range(start=0, length=4)
        >>> selection_of(np.array([0, 1, 3, 4, 6, 7]), 9)
        EvenRanges(count=3, period=3, start=0, length=2)
    """
    runs = list(gapless_runs(positions))
    if len(runs) == 1:
        return Range(int(positions[0]), len(positions))
    starts, lengths = [start for _, start, _ in runs], {length for _, _, length in runs}
    period, rest = divmod(size, len(runs))
    even = not rest and starts == list(range(starts[0], size, period)) and len(lengths) == 1
    if even and starts[0] + (length := lengths.pop()) <= period:
        return EvenRanges(len(runs), period, starts[0], length)
    return Listed(positions)


def kept_entries(model: nn.Module, plans: Sequence[Plan]) -> Kept:
    """Where the entries from before a growth lie now, along each axis that has grown. plans: of the growth, the last one."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    shapes = {id(tensor): tuple(tensor.shape) for _, tensor in tensors}
    kept: dict[tuple[int, int], Positions] = {}

    def back(key: int, edit: Insertion) -> bool:
        axis = key, edit.axis
        positions = kept.get(axis, np.arange(shapes[key][edit.axis]))
        if len(positions) != edit.new_size:
            return False
        kept[axis] = np.delete(positions, list(edit.at))
        return True

    names: dict[str, int] = {name: id(tensor) for name, tensor in tensors}
    if undone(names, "", plans, back) is None:
        raise GrowthError("the growth does not fit the model: was the model changed by hand meanwhile?")
    return kept


@dataclass(frozen=True, eq=False)
class Part:
    """A member's parameter: a parameter of the largest member, and its positions there along the axes that have grown.

    The parameter is found through its module, so that it may be replaced (`load_state_dict(assign=True)`).
    """

    owner: nn.Module  # of the largest member
    key: str
    axes: Mapping[int, Positions]
    whole: tuple[int, ...]  # the shape of the parameter

    @property
    def shared(self) -> nn.Parameter:
        parameter = self.owner._parameters[self.key]
        assert parameter is not None
        return parameter

    def grown(self, kept: Kept) -> Part:
        """The same entries after a further growth."""
        key = id(self.shared)
        axes = dict(self.axes)
        for axis in (axis for owner, axis in kept if owner == key):
            axes[axis] = kept[key, axis][axes[axis]] if axis in axes else kept[key, axis]
        return Part(self.owner, self.key, axes, tuple(self.shared.shape))

    @cached_property
    def _selections(self) -> tuple[tuple[int, Selection], ...]:
        return tuple((axis, selection_of(positions, self.whole[axis])) for axis, positions in sorted(self.axes.items()))

    @property
    def value(self) -> Tensor:
        """The member's tensor; gradients flow to the shared parameter."""
        return self.of(self.shared)

    def of(self, whole: Tensor) -> Tensor:
        """The member's entries of a tensor in the parameter's shape: a view where that is possible, otherwise a copy."""
        if whole.shape != self.whole:
            raise GrowthError(OUTSIDE)
        for axis, selection in self._selections:
            whole = selection.of(whole, axis)
        return whole

    def write(self, whole: Tensor, values: Tensor) -> None:
        """Write values to the member's entries of a tensor in the parameter's shape."""
        target, source = whole, values
        for axis, selection in reversed(self._selections):  # the last axis first, since some views add an axis
            found = selection.pair(target, source, axis)
            if found is None:
                positions = (self.axes.get(axis, np.arange(size)) for axis, size in enumerate(self.whole))
                whole[tuple(torch.from_numpy(index).to(whole.device) for index in np.ix_(*positions))] = values
                return
            target, source = found
        target.copy_(source)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(self.axes[axis]) if axis in self.axes else size for axis, size in enumerate(self.whole))


def parts_of(model: nn.Module) -> dict[int, Part]:
    """All entries of each parameter, by the parameter's id."""
    found: dict[int, Part] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), Part(module, key, {}, tuple(parameter.shape)))
    return found
