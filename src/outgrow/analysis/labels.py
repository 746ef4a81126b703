"""Labels: which unit does each index of each tensor axis belong to?

Every index of every parameter axis starts with a label of its own. A *layout* holds the labels of a tensor: a tuple of
*blocks*, each an integer array over one or more of the tensor's axes (heads × head-dim after a `view` is one block over two
axes). An axis in no block has a size that growth never changes. Operators move labels (`permute`, `reshape`, `take` …)
and declare which belong together (`Ties.equal`).

A block over several axes is a *grid*: its labels can only be added in whole slices along one of its axes. Where a grid is
combined with labels on only one of its axes, these labels are *bound* to the grid's slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Block:
    """Labels over the named axes of a tensor; `labels.shape` are the sizes of `axes`, which ascend."""

    axes: tuple[int, ...]
    labels: Labels


Layout = tuple[Block, ...]


@dataclass(frozen=True)
class Origin:
    """Where labels come from: `size` labels from number `start` on belong to the indices of `axis` of a parameter or buffer."""

    tensor: str
    axis: int
    start: int
    size: int


RETURNED = "it is an output of the model"  # the reason why units can't grow
LOOKED_UP = "it is looked up by the model's input"
FREQUENCIES = "its sizes set the frequencies of a position encoding"
INTERFACE = (RETURNED, LOOKED_UP)  # reasons that hold for old entries only: new ones may be appended on request


class Ties:
    """Collects the relations between labels that operators declare while a trace is interpreted."""

    def __init__(self) -> None:
        self.count = 0
        self.origins: list[Origin] = []
        self.pairs: list[tuple[Labels, Labels]] = []
        self.grids: dict[tuple[tuple[int, ...], bytes], Labels] = {}
        self.bindings: list[tuple[Labels, Labels, int]] = []  # label of a slice, grid, axis
        self.fixed: list[tuple[Labels, str, str]] = []  # labels, reason, module path
        self.repeats: list[Labels] = []  # labels of axes along which a tensor was expanded

    def fresh(self, shape: Sequence[int]) -> Labels:
        size = math.prod(shape)
        labels = np.arange(self.count, self.count + size, dtype=np.int64).reshape(shape)
        self.count += size
        return labels

    def axis(self, tensor: str, axis: int, size: int) -> Labels:
        """Labels for an axis of a parameter or buffer."""
        self.origins.append(Origin(tensor, axis, self.count, size))
        return self.fresh((size,))

    def repeat(self, size: int) -> Labels:
        """Labels for an axis along which a tensor was expanded."""
        self.repeats.append(self.fresh((size,)))
        return self.repeats[-1]

    def equal(self, left: Labels, right: Labels) -> None:
        if left is not right and (left.flat[0] != right.flat[0] or not np.array_equal(left, right)):
            self.pairs.append((left.ravel(), right.ravel()))

    def fix(self, labels: Labels, reason: str, module: str) -> None:
        self.fixed.append((labels.ravel(), reason, module))

    def grid(self, labels: Labels) -> None:
        key = (labels.shape, labels.tobytes())
        self.grids.setdefault(key, labels)

    def bind(self, slices: Labels, grid: Labels, axis: int) -> None:
        """`slices[i]` stands for the whole slice `i` of `grid` along `axis`."""
        self.grid(grid)
        self.bindings.append((slices, grid, axis))

    def classes(self) -> Labels:
        """For each label, the smallest label that equalities tie it to. The equalities are released."""
        found = connected(self.count, self.pairs)
        self.pairs.clear()
        return found


def narrowest(bound: int) -> type[np.signedinteger[Any]]:
    """The type for indices up to a bound: half of the memory where it matters, in models with many layers."""
    return np.int32 if bound < 2**31 - 1 else np.int64


def connected(count: int, pairs: Sequence[tuple[Labels, Labels]]) -> Labels:
    """For each index below `count`, the smallest index that a chain of pairs connects it with."""
    if not pairs:
        return np.arange(count, dtype=np.int64)
    narrow = narrowest(count)
    root = np.arange(count, dtype=narrow)
    left, right = (np.concatenate([pair[side] for pair in pairs], dtype=narrow, casting="same_kind") for side in (0, 1))
    a, b = left, right
    while True:
        np.minimum.at(root, np.maximum(a, b), np.minimum(a, b))
        while True:
            jumped = root[root]
            if np.array_equal(jumped, root):
                break
            root = jumped
        del jumped
        a, b = root[left], root[right]
        apart = a != b
        if not apart.any():
            return root.astype(np.int64)
        left, right, a, b = left[apart], right[apart], a[apart], b[apart]


def block_at(layout: Layout, axis: int) -> Block | None:
    """The block that covers an axis, if any."""
    return next((block for block in layout if axis in block.axes), None)


def make_block(axes: Sequence[int], labels: Labels) -> Layout:
    """A block without the axes along which its labels do not vary; an empty layout if no axis is left.

    Axes of size one carry no label: they broadcast.
    """
    kept, order = [], list(axes)
    index: list[slice | int] = []
    for position, axis in enumerate(order):
        first = labels.take([0], axis=position) if labels.shape[position] else labels
        constant = labels.shape[position] <= 1 or bool((labels == first).all())
        index.append(0 if constant else slice(None))
        if not constant:
            kept.append(axis)
    if not kept:
        return ()
    array = labels[tuple(index)]
    ascending = sorted(range(len(kept)), key=kept.__getitem__)
    return (Block(tuple(kept[i] for i in ascending), np.ascontiguousarray(array.transpose(ascending))),)


def permute(layout: Layout, order: Sequence[int]) -> Layout:
    """Layout of `tensor.permute(order)`."""
    where = {old: new for new, old in enumerate(order)}
    return tuple(b for block in layout for b in make_block([where[axis] for axis in block.axes], block.labels))


def renumber(layout: Layout, where: Callable[[int], int]) -> Layout:
    """The same labels under other axis numbers (order kept): for squeeze, unsqueeze, broadcasting."""
    return tuple(Block(tuple(where(axis) for axis in block.axes), block.labels) for block in layout)


def take(layout: Layout, axis: int, index: slice | int | Sequence[int] | Labels) -> Layout:
    """Layout of `tensor[..., index, ...]`; an integer index removes the axis."""
    result: list[Block] = []
    for block in layout:
        if axis not in block.axes:
            result.append(block)
            continue
        position = block.axes.index(axis)
        if isinstance(index, int):
            rest = tuple(a for a in block.axes if a != axis)
            chosen = np.asarray(block.labels.take(index, axis=position))
            result.extend(make_block(rest, chosen) if rest else ())
        else:
            picked: tuple[slice | Sequence[int] | Labels, ...] = (*(slice(None),) * position, index)
            result.extend(make_block(block.axes, block.labels[picked]))
    if isinstance(index, int):
        return renumber(tuple(result), lambda a: a - (a > axis))
    return tuple(result)


def reduce(ties: Ties, layout: Layout, axes: Iterable[int], keepdim: bool) -> Layout:
    """Layout after a reduction; where a grid loses an axis, new labels are bound to its slices."""
    gone = set(axes)
    result: list[Block] = []
    for block in layout:
        rest = tuple(axis for axis in block.axes if axis not in gone)
        if len(rest) == len(block.axes):
            result.append(block)
        elif rest:
            result.append(Block(rest, outline(ties, block, rest)))
    if keepdim:
        return tuple(result)
    return renumber(tuple(result), lambda axis: axis - sum(g < axis for g in gone))


def outline(ties: Ties, block: Block, rest: tuple[int, ...]) -> Labels:
    """New labels over some axes of a grid, each bound to the grid's slices there; equal slices get equal labels."""
    lost = [axis for axis in block.axes if axis not in rest]
    moved = block.labels.transpose([block.axes.index(axis) for axis in (*rest, *lost)])
    shape = moved.shape[: len(rest)]
    rows = np.ascontiguousarray(moved.reshape(math.prod(shape), -1))
    kinds, which = np.unique(rows, axis=0, return_inverse=True)
    names = ties.fresh((len(kinds),))
    ties.bind(names, kinds, 0)
    labels: Labels = names[which.reshape(-1)].reshape(shape)
    if labels.ndim > 1:
        ties.grid(labels)
    return labels


def pin(ties: Ties, block: Block, axis: int, reason: str, module: str) -> None:
    """Forbid growth along an axis: its size or the meaning of its indices can't be changed."""
    if len(block.axes) == 1:
        ties.fix(block.labels, reason, module)
    else:
        position = block.axes.index(axis)
        pins = ties.fresh((block.labels.shape[position],))
        ties.fix(pins, reason, module)
        ties.bind(pins, block.labels, position)


def reshape(ties: Ties, layout: Layout, old: Sequence[int], new: Sequence[int]) -> Layout:
    """Layout of `tensor.reshape(new)`: labels are broadcast over the axes that merge, reshaped, and dropped where constant."""
    groups = _factor_groups(old, new)
    result: list[Block] = []
    for block in _joined_where_axes_merge(ties, layout, groups, old):
        touched = [group for group in groups if any(axis in block.axes for axis in group[0])]
        old_axes = [axis for group in touched for axis in group[0]]
        new_axes = [axis for group in touched for axis in group[1]]
        if all(sum(old[axis] > 1 for axis in left) == sum(new[axis] > 1 for axis in right) == 1 for left, right in touched):
            result.append(Block(tuple(axis for axis in new_axes if new[axis] > 1), block.labels))  # nothing splits or merges
            continue
        spread = block.labels.reshape([old[axis] if axis in block.axes else 1 for axis in old_axes])
        full = np.broadcast_to(spread, [old[axis] for axis in old_axes])
        result.extend(make_block(new_axes, full.reshape([new[axis] for axis in new_axes])))
    return join(ties, result, new)


def _joined_where_axes_merge(
    ties: Ties, layout: Layout, groups: Sequence[tuple[list[int], list[int]]], shape: Sequence[int]
) -> Layout:
    """The layout with one grid for blocks of which axes merge, so that the grid has all of their axes.

    Keys (batch, key heads, queries per key, …, features) are a block of heads × features and one of queries. When a view merges
    heads and queries, their features are still an axis of the grid, and a head can be added.
    """
    result = list(layout)
    for left, _ in groups:
        parts = [block for block in result if set(block.axes) & set(left)]
        if len(parts) > 1 and any(len(part.axes) > 1 for part in parts):
            whole = _whole(ties, parts, shape)
            result = [*(block for block in result if not any(block is part for part in parts)), whole]
    return tuple(result)


def _whole(ties: Ties, parts: Sequence[Block], shape: Sequence[int]) -> Block:
    """New labels over all axes of some blocks, each of which has fewer axes, and is tied to them."""
    axes = sorted({axis for part in parts for axis in part.axes})
    which = numbered(_columns(parts, axes, shape))
    labels = ties.fresh((int(which.max()) + 1,))[which].reshape([shape[axis] for axis in axes])
    whole = Block(tuple(axes), labels)
    for part in parts:
        tie(ties, part, whole)
    return whole


def _columns(parts: Sequence[Block], axes: Sequence[int], shape: Sequence[int]) -> list[Labels]:
    """The labels of each block, broadcast over some axes, in one row."""
    columns = []
    for part in parts:
        spread = part.labels.reshape([shape[axis] if axis in part.axes else 1 for axis in axes])
        columns.append(np.broadcast_to(spread, [shape[axis] for axis in axes]).ravel())
    return columns


def join(ties: Ties, blocks: Sequence[Block], shape: Sequence[int]) -> Layout:
    """Merge blocks that share an axis into one grid of new labels, and bind the old labels to its axes."""
    result: list[Block] = []
    for block in blocks:
        clash = [other for other in result if set(other.axes) & set(block.axes)]
        if not clash:
            result.append(block)
            continue
        parts = [*clash, block]
        axes = sorted({axis for part in parts for axis in part.axes})
        if all(len(part.axes) < len(axes) for part in parts):
            result = [*(other for other in result if other not in clash), _whole(ties, parts, shape)]
            continue
        uniques = [np.unique(column, return_inverse=True) for column in _columns(parts, axes, shape)]
        grid = ties.fresh([len(values) for values, _ in uniques])
        for position, (values, _) in enumerate(uniques):
            ties.bind(values, grid, position)
        merged = grid[tuple(inverse.reshape(-1) for _, inverse in uniques)]
        result = [other for other in result if other not in clash]
        result.extend(make_block(axes, merged.reshape([shape[axis] for axis in axes])))
    return tuple(result)


def numbered(columns: Sequence[Labels]) -> Labels:
    """For each row of some columns, the number of its value: equal rows have equal numbers."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        number = np.unique(number * len(values) + inverse.reshape(-1), return_inverse=True)[1].reshape(-1)
    return number


def _factor_groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of equal product into the shortest runs of axes whose products agree."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left: list[int] = []
        right: list[int] = []
        a = b = 1
        while True:
            if a == b and left and right:
                break
            if (a <= b and i < len(old)) or j >= len(new):
                if i >= len(old):
                    break
                a *= old[i]
                left.append(i)
                i += 1
            else:
                b *= new[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def meet(ties: Ties, layouts: Sequence[Layout], shape: Sequence[int]) -> Layout:
    """Layout of the elementwise combination of operands with aligned axes: labels at the same index belong together."""
    tie_all(ties, layouts)
    blocks = sorted((block for layout in layouts for block in layout), key=lambda block: -len(block.axes))
    result: list[Block] = []
    for block in blocks:
        if not any(set(block.axes) <= set(host.axes) for host in result):
            result.append(block)
    return join(ties, result, shape)


def tie_all(ties: Ties, layouts: Sequence[Layout]) -> None:
    """Tie all blocks of different operands that share an axis; blocks on the same axes are tied to the first of them."""
    kinds: dict[tuple[int, ...], Block] = {}
    for block in (block for layout in layouts for block in layout):
        first = kinds.setdefault(block.axes, block)
        if first is not block:
            tie(ties, block, first)
    blocks = list(kinds.values())
    for index, block in enumerate(blocks):
        for other in (b for b in blocks[index + 1 :] if not set(b.axes).isdisjoint(block.axes)):
            small, large = sorted((block, other), key=lambda b: len(b.axes))
            tie(ties, small, large)


def tie(ties: Ties, block: Block, host: Block) -> None:
    """Tie two blocks: equal labels if they have the same axes, otherwise bound along the axes that they share."""
    if host.axes == block.axes:
        ties.equal(host.labels, block.labels)
        return
    common = tuple(axis for axis in block.axes if axis in host.axes)
    if common == block.axes and len(common) == 1:
        ties.bind(block.labels, host.labels, host.axes.index(common[0]))
        return
    sides = [side.labels if side.axes == common else outline(ties, side, common) for side in (block, host)]
    ties.equal(sides[0], sides[1])
