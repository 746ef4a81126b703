"""Tensors that are written piece by piece: `out[:, :, :modes] = y`, padded sequences, canvases.

What is written meets the whole along every axis that it covers from end to end. Along an axis that it covers in part, the
whole has labels of its own there, which the write has tied already, or it gets them from the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from outgrow.analysis.effects import Effect, Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Block, Labels, Layout, block_at
from outgrow.analysis.rules.product import rename
from outgrow.trace.operators import Op, Ref, refs_in
from outgrow.trace.view_regions import Box

WrittenPart = tuple[Ref, Box, Layout]  # what was written, where, and what it carries, by the axes of the whole


def write_through_view(reading: Reading, op: Op) -> Outcome:
    """(base, pieces, boxes): pieces of the base were overwritten, in this order, through views of it."""
    base, written, boxes = op.args
    pieces = [_placed(reading, ref, box) for ref, box in zip(written, boxes, strict=True) if box is not None]
    if len(pieces) < len(boxes):
        reading.pin_all(refs_in(op.args), "part of it is written in place through a view that is no plain slice", op)
        return Outcome(((),), Move(tuple(ref.value for ref in refs_in(op.args))))
    shape = reading.shape(base)
    partial = {axis for _, box, _ in pieces for axis, side in enumerate(box) if not side.whole}
    own = reading.layout(base)
    meeting = [(base, _inside(own, partial), {axis: size for axis, size in enumerate(shape) if axis not in partial})]
    for ref, box, layout in pieces:
        sizes = {axis: side.size for axis, side in enumerate(box) if side.whole and axis not in partial}
        meeting.append((ref, _inside(layout, partial), sizes))
    joint = reading.meet(op, meeting, shape)
    joint += tuple(block for block in own if set(block.axes) & partial)
    for axis in sorted(partial):
        if block_at(joint, axis) is None:
            joint += _pieced(reading, op, base, pieces, axis)
    return Outcome((joint,), _effect(reading, base, written))


def _placed(reading: Reading, ref: Ref, box: Box) -> WrittenPart:
    """A piece with its axes counted as those of the whole."""
    place = {side.axis: axis for axis, side in enumerate(box) if side.axis is not None}
    return ref, box, rename(tuple(block for block in reading.layout(ref) if set(block.axes) <= set(place)), place)


def _inside(layout: Layout, partial: set[int]) -> Layout:
    return tuple(block for block in layout if not set(block.axes) & partial)


def _pieced(reading: Reading, op: Op, base: Ref, pieces: Sequence[WrittenPart], axis: int) -> Layout:
    """Labels along an axis that pieces cover in part, where the whole has none: those of the pieces, beside fresh ones."""
    found = [(ref, box[axis], block_at(layout, axis)) for ref, box, layout in pieces]
    if not any(block is not None for _, _, block in found):
        return ()
    if not reading.uniform[base.value] or any(block is not None and len(block.axes) > 1 for _, _, block in found):
        reading.pin_all([ref for ref, _, _ in pieces], "it is written beside values of another structure", op)
        return ()
    labels: Labels = reading.ties.fresh((reading.shape(base)[axis],))
    for ref, side, block in found:
        here = slice(side.start, side.start + side.step * (side.count - 1) + 1, side.step)
        if block is not None:
            labels[here] = block.labels
        elif side.count > 1 and not reading.uniform[ref.value]:
            reading.ties.fix(labels[here], "it is not written by parameters", op.module)
    return (Block((axis,), labels),)


def _effect(reading: Reading, base: Ref, written: Sequence[Ref]) -> Effect:
    """Around the pieces the whole stays what it was: zeros, another constant, or values of its own."""
    values = tuple(ref.value for ref in written)
    if reading.zeros[base.value]:
        return Move(values)
    return Map(values, zero=False) if reading.uniform[base.value] else Move((base.value, *values))


RULES = {"outgrow.write_through_view": write_through_view}
