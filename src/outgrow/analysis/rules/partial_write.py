"""Tensors that are written part by part: `out[:, :, :modes] = y`, padded sequences, canvases.

The labels of a part are tied to those of the base along every axis that the part covers completely. Along a partly covered
axis, the base keeps its own labels, which the write has tied already, or gets labels from the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from outgrow.analysis.effects import Effect, Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Block, Labels, Layout, block_at
from outgrow.analysis.rules.product import rename
from outgrow.trace.operators import Op, Ref, refs_in
from outgrow.trace.view_regions import Box, Side

WrittenPart = tuple[Ref, Box, Layout]  # written value, region, layout over the axes of the base


def write_through_view(reading: Reading, op: Op) -> Outcome:
    """(base, parts, boxes): parts of the base were overwritten, in this order, through views of it."""
    base, written, boxes = op.args
    pieces = [_placed(reading, ref, box) for ref, box in zip(written, boxes, strict=True) if box is not None]
    if len(pieces) < len(boxes):
        reading.pin_all(refs_in(op.args), "part of it is written in place through a view that is not a plain slice", op)
        return Outcome(((),), Move(tuple(ref.value for ref in refs_in(op.args))))
    shape = reading.shape(base)
    partial = {axis for _, box, _ in pieces for axis, side in enumerate(box) if not side.whole}
    own = reading.layout(base)
    meeting = [(base, _inside(own, partial), {axis: size for axis, size in enumerate(shape) if axis not in partial})]
    for ref, box, layout in pieces:
        spanned = {axis for block in layout for axis in block.axes if set(block.axes) & partial}  # by a grid: see `_pieced`
        sizes = {axis: side.size for axis, side in enumerate(box) if side.whole and axis not in partial | spanned}
        meeting.append((ref, _inside(layout, partial), sizes))
    joint = reading.meet(op, meeting, shape)
    joint += tuple(block for block in own if set(block.axes) & partial)
    for axis in sorted(partial):
        if block_at(joint, axis) is None:
            joint += _pieced(reading, op, base, pieces, axis)
    return Outcome((joint,), _effect(reading, base, written))


def _placed(reading: Reading, ref: Ref, box: Box) -> WrittenPart:
    """A part with its axes numbered as those of the base."""
    place = {side.axis: axis for axis, side in enumerate(box) if side.axis is not None}
    return ref, box, rename(tuple(block for block in reading.layout(ref) if set(block.axes) <= set(place)), place)


def _inside(layout: Layout, partial: set[int]) -> Layout:
    return tuple(block for block in layout if not set(block.axes) & partial)


def _pieced(reading: Reading, op: Op, base: Ref, pieces: Sequence[WrittenPart], axis: int) -> Layout:
    """Labels along a partly covered axis on which the base has none: those of the parts, and new ones elsewhere."""
    found = [(ref, box[axis], block_at(layout, axis)) for ref, box, layout in pieces]
    if not any(block is not None for _, _, block in found):
        return ()
    if len(found) == 1 and found[0][2] is not None and reading.uniform[base.value]:
        box, host = pieces[0][1], found[0][2]
        if all(box[other].whole for other in host.axes if other != axis):
            return _grid_with(reading, base, host, axis, found[0][1])
    if not reading.uniform[base.value] or any(block is not None and len(block.axes) > 1 for _, _, block in found):
        reading.pin_all([ref for ref, _, _ in pieces], "it is written into a tensor next to values with other axes", op)
        return ()
    labels: Labels = reading.ties.fresh((reading.shape(base)[axis],))
    for ref, side, block in found:
        here = slice(side.start, side.start + side.step * (side.count - 1) + 1, side.step)
        if block is not None:
            labels[here] = block.labels
        elif side.count > 1 and not reading.uniform[ref.value]:
            reading.ties.fix(labels[here], "no parameter produces its values", op.module)
    return (Block((axis,), labels),)


def _grid_with(reading: Reading, base: Ref, host: Block, axis: int, side: Side) -> Layout:
    """Labels of a base in which a grid fills a part of one axis: DeepSeek's keys, some of whose features are written later."""
    sizes = reading.shape(base)
    labels = reading.ties.fresh([sizes[other] for other in host.axes])
    here = slice(side.start, side.start + side.step * (side.count - 1) + 1, side.step)
    region = tuple(here if other == axis else slice(None) for other in host.axes)
    labels[region] = host.labels
    if len(host.axes) > 1:
        reading.ties.grid(labels)
    return (Block(host.axes, labels),)


def _effect(reading: Reading, base: Ref, written: Sequence[Ref]) -> Effect:
    """The effect: outside the parts the base keeps its values, which are zeros, another constant, or arbitrary."""
    values = tuple(ref.value for ref in written)
    if reading.zeros[base.value]:
        return Move(values)
    return Map(values, zero=False) if reading.uniform[base.value] else Move((base.value, *values))


RULES = {"outgrow.write_through_view": write_through_view}
