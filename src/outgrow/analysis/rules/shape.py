"""Operators that move indices: views, transposes, slices, concatenation, padding, gathers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outgrow.analysis.effects import Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import (
    LOOKED_UP,
    Block,
    Labels,
    Layout,
    block_at,
    make_block,
    meet,
    permute,
    reduce,
    renumber,
    reshape,
    take,
)
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op, Ref, refs_in


def moved(reading: Reading, ref: Ref, *layouts: Layout) -> Outcome:
    return Outcome(layouts, Move((ref.value,)), reading.uniform[ref.value])


def out_shape(reading: Reading, op: Op, index: int = 0) -> tuple[int, ...]:
    return reading.trace.values[op.outputs[index]].shape


def axis_of(op: Op, position: int, rank: int, default: int = 0) -> int:
    axis = op.args[position] if len(op.args) > position else op.kwargs.get("dim", default)
    return int(axis) % rank


def view(reading: Reading, op: Op) -> Outcome:
    """A view; an axis along which the tensor was expanded gets labels, since the view may merge it with others.

    So keys that several query heads share, expanded to (batch, key heads, queries per key, …) and merged, can grow along both.
    """
    ref = op.args[0]
    layout, shape = reading.layout(ref), reading.shape(ref)
    expanded = [axis for axis in sorted(reading.repeated.get(ref.value, ())) if axis and block_at(layout, axis) is None]
    if not layout or not expanded or reading.constant[ref.value]:
        return moved(reading, ref, reshape(reading.ties, layout, shape, out_shape(reading, op)))
    new = tuple(Block((axis,), reading.ties.repeat(shape[axis])) for axis in expanded)
    reading.expanded.setdefault(ref.value, new)
    layout = reshape(reading.ties, (*layout, *new), shape, out_shape(reading, op))
    return Outcome((layout,), Move((ref.value,), repeats=True), reading.uniform[ref.value])


def transpose(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    rank = len(reading.shape(ref))
    order = list(range(rank))
    first, second = (0, 1) if len(op.args) < 3 else (op.args[1] % rank, op.args[2] % rank)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return moved(reading, ref, permute(reading.layout(ref), order))


def permutation(reading: Reading, op: Op) -> Outcome:
    ref, order = op.args
    return moved(reading, ref, permute(reading.layout(ref), [axis % len(order) for axis in order]))


def expand(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    return moved(reading, ref, reading.spread(ref, len(out_shape(reading, op))))


def unsqueeze(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    new = op.args[1] % (len(reading.shape(ref)) + 1)
    return moved(reading, ref, renumber(reading.layout(ref), lambda axis: axis + (axis >= new)))


def select(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    shape = reading.shape(ref)
    axis, index = op.args[1] % len(shape), op.args[2]
    if op.outputs[0] in reading.read:  # BART's code takes only the shape of what it selects
        reading.pin(reading.layout(ref), [axis], "the code selects one of its indices", op)
    return moved(reading, ref, take(reading.layout(ref), axis, index % shape[axis]))


def unbind(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    axis = axis_of(op, 1, len(reading.shape(ref)))
    reading.pin(reading.layout(ref), [axis], "the code splits it into single indices", op)
    return moved(reading, ref, *(take(reading.layout(ref), axis, i) for i in range(len(op.outputs))))


def slice_(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    shape = reading.shape(ref)
    axis = axis_of(op, 1, len(shape))
    start, stop, step = (*op.args[2:5], None, None, None)[:3]
    return moved(reading, ref, take(reading.layout(ref), axis, slice(start, stop, step)))


def split(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    axis = axis_of(op, 2, len(reading.shape(ref)))
    layouts, start = [], 0
    for index in range(len(op.outputs)):
        size = out_shape(reading, op, index)[axis]
        layouts.append(take(reading.layout(ref), axis, slice(start, start + size)))
        start += size
    return moved(reading, ref, *layouts)


def glu(reading: Reading, op: Op) -> Outcome:
    """a·σ(b) for the two halves a and b of an axis: their labels are tied, and zeros stay zero."""
    ref = op.args[0]
    axis = axis_of(op, 1, len(reading.shape(ref)), default=-1)
    half = reading.shape(ref)[axis] // 2
    halves = [take(reading.layout(ref), axis, slice(start, start + half)) for start in (0, half)]
    layout = meet(reading.ties, halves, out_shape(reading, op))
    return Outcome((layout,), Map((ref.value,), zero=True), reading.uniform[ref.value])


def cat(reading: Reading, op: Op) -> Outcome:
    every = refs_in(op.args[0])
    refs = [ref for ref in every if 0 not in reading.shape(ref)] or every  # an empty part, such as the features without RoPE
    rank = len(reading.shape(refs[0]))
    return concatenate(reading, op, refs, [reading.layout(ref) for ref in refs], axis_of(op, 1, rank))


def stack(reading: Reading, op: Op) -> Outcome:
    refs = refs_in(op.args[0])
    new = axis_of(op, 1, len(reading.shape(refs[0])) + 1)
    layouts = [renumber(reading.layout(ref), lambda axis: axis + (axis >= new)) for ref in refs]
    hosts = {block.axes for layout in layouts for block in layout}
    blocks: list[Block] = []
    for axes in hosts:
        parts = [next((block for block in layout if block.axes == axes), None) for layout in layouts]
        if any(part is None for part in parts):
            for layout in layouts:
                reading.pin(layout, axes, "it is stacked with a tensor of fixed size", op)
            continue
        labels = np.stack([part.labels for part in parts if part is not None])
        for block in make_block((new, *axes), labels):
            reading.pin((block,), [new] if len(block.axes) > 1 else [], "the code stacks a fixed number of tensors", op)
            blocks.append(block)
    return Outcome((tuple(blocks),), Move(tuple(ref.value for ref in refs)), all(reading.uniform[ref.value] for ref in refs))


def concatenate(reading: Reading, op: Op, refs: Sequence[Ref], layouts: Sequence[Layout], axis: int) -> Outcome:
    """Along `axis` the labels are concatenated; on all other axes they are tied."""
    shape = out_shape(reading, op)
    effect = Move(tuple(ref.value for ref in refs))
    hosts = [block_at(layout, axis) for layout in layouts]
    others = [tuple(block for block in layout if axis not in block.axes) for layout in layouts]
    operands = []
    for ref, layout, host in zip(refs, others, hosts, strict=True):
        sizes = {a: size for a, size in enumerate(reading.shape(ref)) if a != axis and not (host and a in host.axes)}
        operands.append((ref, layout, sizes))
    rest = reading.meet(op, operands, shape)
    if not any(hosts):
        return Outcome((rest,), effect)
    axes = max((host.axes for host in hosts if host), key=len)
    pieces: list[Labels] = []
    for ref, host in zip(refs, hosts, strict=True):
        size = [reading.shape(ref)[a] for a in axes]
        if host is not None and host.axes == axes:
            pieces.append(host.labels)
            continue
        fresh = reading.ties.fresh(size)
        if host is not None or len(axes) > 1:
            reading.pin_all(refs, "it is concatenated with a tensor of other axes", op)
        elif not reading.uniform[ref.value]:
            reading.ties.fix(fresh, "no parameter produces its values", op.module)
        pieces.append(fresh)
    joined = make_block(axes, np.concatenate(pieces, axis=axes.index(axis)))
    return Outcome(((*rest, *joined),), effect)


def pad(reading: Reading, op: Op) -> Outcome:
    """Constant padding; on a labelled axis the padding gets labels of its own."""
    ref, amounts = op.args[:2]
    number = op.args[2] if len(op.args) > 2 else op.kwargs.get("value", 0)
    layout = reading.layout(ref)
    rank = len(reading.shape(ref))
    for index in range(len(amounts) // 2):
        axis = rank - 1 - index
        before, after = amounts[2 * index], amounts[2 * index + 1]
        host = block_at(layout, axis)
        if host is None or not (before or after):
            continue
        if len(host.axes) > 1 or before < 0 or after < 0:
            reading.pin((host,), [axis], "it is padded", op)
            return Outcome((reduce(reading.ties, layout, [axis], keepdim=True),), Move((ref.value,)))
        labels = np.concatenate([reading.ties.fresh((before,)), host.labels, reading.ties.fresh((after,))])
        layout = tuple(Block(host.axes, labels) if block is host else block for block in layout)
    return Outcome((layout,), Move((ref.value,)) if number == 0 else Map((ref.value,), False))


def repeat(reading: Reading, op: Op) -> Outcome:
    ref, times = op.args[:2]
    layout: Layout = ()
    for block in reading.spread(ref, len(times)):
        labels = np.tile(block.labels, [times[axis] for axis in block.axes])
        layout += make_block(block.axes, labels)
    return moved(reading, ref, layout)


def shuffle_axis(reading: Reading, op: Op) -> Outcome:
    """roll and flip: allowed only along axes that carry no unit."""
    ref = op.args[0]
    named = op.args[-1] if base_name(op) == "flip" else (op.args[2] if len(op.args) > 2 else ())
    rank = len(reading.shape(ref))
    axes = [axis % rank for axis in named] or list(range(rank))
    reading.pin(reading.layout(ref), axes, f"{op.name} reorders its units", op)
    return moved(reading, ref, reading.layout(ref))


def triangle(reading: Reading, op: Op) -> Outcome:
    """tril and triu: entries of the last two axes become zero, depending on their positions."""
    ref = op.args[0]
    rank = len(reading.shape(ref))
    reading.pin(reading.layout(ref), [rank - 2, rank - 1], f"{op.name} masks its units by their positions", op)
    return Outcome((reading.layout(ref),), Move((ref.value,)))


triangle.varies = True  # type: ignore[attr-defined]


def index(reading: Reading, op: Op) -> Outcome:
    """Advanced indexing: indexed axes are pinned, the others keep their labels."""
    ref, indices = op.args[:2]
    indexed = [axis for axis, item in enumerate(indices) if item is not None]
    positions = reading.trace.values[indices[indexed[0]].value].integers
    if len(indexed) == 1 and positions:
        return _listed(reading, op, indexed[0], positions)
    reading.pin(reading.layout(ref), indexed, "it is looked up by index", op)
    gained = len(out_shape(reading, op)) - (len(reading.shape(ref)) - len(indexed))
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if adjacent else 0
    if any(not adjacent and block.axes for block in reading.layout(ref)):
        reading.pin_all([ref], "it is looked up by index on several axes", op)
        return Outcome(((),), Move((ref.value,)))

    def where(axis: int) -> int:
        return axis - len(indexed) + gained if axis > start else axis

    kept = tuple(block for block in reading.layout(ref) if not set(block.axes) & set(indexed))
    for block in reading.layout(ref):
        if set(block.axes) & set(indexed) and len(block.axes) > 1:
            reading.ties.fix(block.labels, "it is looked up by index", op.module)
    return moved(reading, ref, renumber(kept, where))


def _listed(reading: Reading, op: Op, axis: int, positions: tuple[int, ...]) -> Outcome:
    """Indexing with a list in the code: positions counted from the end stay right if only units before them are added."""
    ref = op.args[0]
    layout, size = reading.layout(ref), reading.shape(ref)[axis]
    here = [position % size for position in positions]
    from_end = all(position < 0 for position in positions)
    part = slice(min(here), None) if from_end else slice(0, None if min(positions) < 0 else max(here) + 1)
    reason = "the code selects some of its indices"
    if len(range(size)[part]) > 1:
        reading.pin(take(layout, axis, part), [axis], reason, op)
    else:
        for block in (block for block in layout if block.axes == (axis,)):
            reading.ties.fix(block.labels[part], reason, op.module)
    return moved(reading, ref, take(layout, axis, here))


def lookup(reading: Reading, op: Op) -> Outcome:
    """`embedding(weight, indices)`: data selects rows, columns are features."""
    weight, indices = refs_in(op.args)[:2]
    reading.pin(reading.layout(weight), [0], LOOKED_UP, op)
    rank = len(reading.shape(indices))
    kept = reduce(reading.ties, reading.layout(weight), [0], keepdim=True)
    return moved(reading, weight, renumber(kept, lambda axis: axis + rank - 1))


def index_select(reading: Reading, op: Op) -> Outcome:
    ref = op.args[0]
    axis = op.args[1] % len(reading.shape(ref))
    reading.pin(reading.layout(ref), [axis], "it is looked up by index", op)
    return moved(reading, ref, reduce(reading.ties, reading.layout(ref), [axis], keepdim=True))


def windows(reading: Reading, op: Op) -> Outcome:
    """`tensor.unfold(axis, size, step)`: the window becomes a last axis."""
    ref = op.args[0]
    axis = op.args[1] % len(reading.shape(ref))
    reading.pin(reading.layout(ref), [axis], "windows slide over it", op)
    return moved(reading, ref, reduce(reading.ties, reading.layout(ref), [axis], keepdim=True))


def im2col(reading: Reading, op: Op) -> Outcome:
    """(batch, channels, h, w) → (batch, channels·kh·kw, places)."""
    ref = op.args[0]
    channels = reading.shape(ref)[-3]
    rank = len(out_shape(reading, op))
    kernel = out_shape(reading, op)[-2] // channels
    wide = (*reading.shape(ref)[:-3], channels, kernel, out_shape(reading, op)[-1])
    reading.pin(reading.layout(ref), [rank - 1, rank], "windows slide over it", op)
    kept = reduce(reading.ties, reading.layout(ref), [rank - 1, rank], keepdim=True)
    return moved(reading, ref, reshape(reading.ties, kept, wide, out_shape(reading, op)))


def col2im(reading: Reading, op: Op) -> Outcome:
    """The inverse of `im2col`."""
    ref = op.args[0]
    shape = out_shape(reading, op)
    old = reading.shape(ref)
    kernel = old[-2] // shape[-3]
    wide = (*old[:-2], shape[-3], kernel, old[-1])
    layout = reshape(reading.ties, reading.layout(ref), old, wide)
    reading.pin(layout, [len(wide) - 2, len(wide) - 1], "overlapping windows are added along it", op)
    return moved(reading, ref, reduce(reading.ties, layout, [len(wide) - 2, len(wide) - 1], keepdim=True))


def pixel_shuffle(reading: Reading, op: Op) -> Outcome:
    """(…, c·r·r, h, w) → (…, c, h·r, w·r)."""
    ref, r = op.args
    *lead, channels, h, w = reading.shape(ref)
    wide = (*lead, channels // (r * r), r, r, h, w)
    n = len(lead)
    layout = reshape(reading.ties, reading.layout(ref), reading.shape(ref), wide)
    layout = permute(layout, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    tall = (*lead, channels // (r * r), h, r, w, r)
    reading.pin(layout, [n + 2, n + 4], "its indices become pixels of the image", op)
    return moved(reading, ref, reshape(reading.ties, layout, tall, out_shape(reading, op)))


def pixel_unshuffle(reading: Reading, op: Op) -> Outcome:
    """(…, c, h·r, w·r) → (…, c·r·r, h, w)."""
    ref, r = op.args
    *lead, channels, h, w = reading.shape(ref)
    n = len(lead)
    tall = (*lead, channels, h // r, r, w // r, r)
    layout = reshape(reading.ties, reading.layout(ref), reading.shape(ref), tall)
    layout = permute(layout, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    wide = (*lead, channels, r, r, h // r, w // r)
    return moved(reading, ref, reshape(reading.ties, layout, wide, out_shape(reading, op)))


def channel_shuffle(reading: Reading, op: Op) -> Outcome:
    """channels as (groups, n) → (n, groups)."""
    ref, groups = op.args
    batch, channels, *space = reading.shape(ref)
    layout = reshape(reading.ties, reading.layout(ref), reading.shape(ref), (batch, groups, channels // groups, *space))
    layout = permute(layout, [0, 2, 1, *range(3, 3 + len(space))])
    return moved(reading, ref, reshape(reading.ties, layout, (batch, channels // groups, groups, *space), reading.shape(ref)))


def as_strided(reading: Reading, op: Op) -> Outcome:
    """Pooling to one position rewrites the strides of axes of size one; all other uses are refused."""
    ref, size, stride = op.args[:3]
    contiguous = [int(np.prod(size[axis + 1 :])) for axis in range(len(size))]
    if tuple(size) == reading.shape(ref) and all(
        n == 1 or have == want for n, have, want in zip(size, stride, contiguous, strict=True)
    ):
        return moved(reading, ref, reading.layout(ref))
    reading.pin_all([ref], "its memory is addressed directly by as_strided", op)
    return Outcome(((),), Move((ref.value,)))


RULES = {
    **{f"aten.{name}": view for name in "view _unsafe_view reshape _reshape_alias squeeze flatten unflatten".split()},
    **{f"aten.{name}": transpose for name in ("t", "transpose")},
    **{f"aten.{name}": split for name in "split split_with_sizes unsafe_split unsafe_split_with_sizes chunk".split()},
    **{f"aten.{name}": shuffle_axis for name in ("roll", "flip")},
    **{f"aten.{name}": triangle for name in ("tril", "triu")},
    "aten.as_strided": as_strided,
    "aten.permute": permutation,
    "aten.expand": expand,
    "aten.unsqueeze": unsqueeze,
    "aten.select": select,
    "aten.unbind": unbind,
    "aten.slice": slice_,
    "aten.cat": cat,
    "aten.glu": glu,
    "aten.stack": stack,
    "aten.constant_pad_nd": pad,
    "aten.repeat": repeat,
    "aten.index": index,
    "aten.embedding": lookup,
    "aten.index_select": index_select,
    "aten.unfold": windows,
    "aten.im2col": im2col,
    "aten.col2im": col2im,
    "aten.pixel_shuffle": pixel_shuffle,
    "aten.pixel_unshuffle": pixel_unshuffle,
    "aten.channel_shuffle": channel_shuffle,
    "aten.native_channel_shuffle": channel_shuffle,
}
