"""The part of a tensor that a view covers: a start and a step along each axis.

A view made by slices, selections and transposes covers a *box* of its base. It is computed from the memory layout: the offset
gives the start of the box, and each stride of the view is a multiple of a stride of the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True)
class Side:
    """One axis of the base: start and step of the box, and the corresponding axis of the view (or None)."""

    start: int
    step: int
    axis: int | None
    count: int  # number of indices that the view covers
    size: int

    @property
    def whole(self) -> bool:
        return self.count == self.size


Box = tuple[Side, ...]


def box_of(view: Tensor, base: Tensor) -> Box | None:
    """The box of its base that a view covers; None if it is not a box."""
    axes = sorted((axis for axis in range(base.ndim) if base.shape[axis] > 1), key=base.stride, reverse=True)
    for outer, inner in pairwise(axes):
        if base.stride(outer) < base.stride(inner) * base.shape[inner]:
            return None
    offset = int(view.storage_offset() - base.storage_offset())
    starts: dict[int, int] = {}
    for axis in axes:
        if base.stride(axis) < 1 or offset < 0:
            return None
        starts[axis], offset = divmod(offset, base.stride(axis))
    if offset:
        return None
    along: dict[int, tuple[int, int]] = {}
    for axis in (axis for axis in range(view.ndim) if view.shape[axis] > 1):
        host = next((a for a in axes if a not in along and 0 < base.stride(a) <= view.stride(axis)), None)
        if host is None or view.stride(axis) % base.stride(host):
            return None
        along[host] = axis, view.stride(axis) // base.stride(host)
    sides = tuple(_side(base.shape[axis], starts.get(axis, 0), along.get(axis), view) for axis in range(base.ndim))
    fits = all(side.start + side.step * (side.count - 1) < side.size for side in sides)
    return sides if fits else None


def _side(size: int, start: int, along: tuple[int, int] | None, view: Tensor) -> Side:
    return Side(start, 1, None, 1, size) if along is None else Side(start, along[1], along[0], view.shape[along[0]], size)
