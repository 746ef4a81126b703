"""Values from places that other values name: bags of embeddings, samples of maps, and pooling undone.

All units of a place are taken together, so they are treated alike. What names the places are numbers of rows or coordinates,
which no growth changes.
"""

from __future__ import annotations

from outgrow.analysis.effects import Effect, Map, Move
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import LOOKED_UP, reduce, renumber
from outgrow.trace.operators import Op, refs_in

MAXIMUM = 2  # mode of an embedding bag; the others are sums and means


def embedding_bag(reading: Reading, op: Op) -> Outcome:
    """(weight, indices, offsets, …, mode, …): the sum, mean or maximum of the rows of each bag, and facts about bags."""
    weight = op.args[0]
    reading.pin(reading.layout(weight), [0], LOOKED_UP, op)
    kept = reduce(reading.ties, reading.layout(weight), [0], keepdim=True)
    others = [ref for ref in refs_in((op.args[1:], dict(op.kwargs))) if reading.layout(ref)]
    reading.pin_all(others, "it selects or weights rows of an embedding", op)
    mode = op.args[4] if len(op.args) > 4 else op.kwargs.get("mode", 0)
    effect: Effect = Map((weight.value,), zero=True, homogeneous=True) if mode == MAXIMUM else Move((weight.value,))
    return Outcome((kept,), effect)


def grid_sample(reading: Reading, op: Op) -> Outcome:
    """(batch, channels, place…) at the coordinates (batch, sample…, 2 or 3): (batch, channels, sample…)."""
    x, grid = refs_in(op.args)[:2]
    rank = len(reading.shape(x))
    places, last = list(range(2, rank)), len(reading.shape(grid)) - 1
    reading.pin(reading.layout(x), places, "samples are taken along it", op)
    reading.pin(reading.layout(grid), [last], "its indices are coordinates", op)
    kept = reduce(reading.ties, reading.layout(x), places, keepdim=True)
    coordinates = reduce(reading.ties, reading.layout(grid), [last], keepdim=True)
    moved = renumber(coordinates, lambda axis: axis + (axis > 0))
    sizes = [dict(enumerate(reading.shape(x)[:2])), {a + (a > 0): size for a, size in enumerate(reading.shape(grid)[:-1])}]
    layout = reading.meet(op, [(x, kept, sizes[0]), (grid, moved, sizes[1])], reading.trace.values[op.outputs[0]].shape)
    effect: Effect = Map((x.value, grid.value), zero=False) if reading.layout(grid) else Move((x.value,))
    return Outcome((layout,), effect)


def affine_grid(reading: Reading, op: Op) -> Outcome:
    """(batch, 2, 3) → the coordinates of all places of a map."""
    theta = op.args[0]
    reading.pin(reading.layout(theta), [1, 2], "its indices are those of an affine map", op)
    return Outcome((reduce(reading.ties, reading.layout(theta), [1, 2], keepdim=True),), Map((theta.value,), zero=False))


def max_unpool(reading: Reading, op: Op) -> Outcome:
    """Values at the places of maxima that a pooling has found, and zeros elsewhere."""
    x, indices = refs_in(op.args)[:2]
    rank = len(reading.shape(x))
    places = list(range(2, rank))
    operands = []
    for ref in (x, indices):
        reading.pin(reading.layout(ref), places, f"{op.name} resamples along it", op)
        kept = reduce(reading.ties, reading.layout(ref), places, keepdim=True)
        operands.append((ref, kept, dict(enumerate(reading.shape(ref)[:2]))))
    layout = reading.meet(op, operands, reading.trace.values[op.outputs[0]].shape)
    return Outcome((layout,), Map((x.value, indices.value), zero=True))


RULES = {
    **{f"aten.{name}": embedding_bag for name in ("_embedding_bag", "_embedding_bag_forward_only")},
    **{f"aten.{name}": grid_sample for name in ("grid_sampler_2d", "grid_sampler_3d")},
    **{f"aten.{name}": max_unpool for name in ("max_unpool2d", "max_unpool3d")},
    "aten.affine_grid_generator": affine_grid,
}
