"""Messages along the edges of a graph: an index selects rows, and rows with the same index are added, averaged or maximised.

    gather    y[e, u] = x[i[e], u]
    scatter   y[n, u] = Σ over e with i[e] = n of x[e, u]     (or their mean, maximum, minimum, product)

Every unit u is treated alike: sums and means are linear, extremes are homogeneous. This holds only if the index is the same for
every unit. `index_add` and similar operators take one index per row. `gather` and `scatter` take one per entry; there the index
must have been expanded over the units (see `analysis/expanded_axes.py`). The axis of the rows is not a volume: its length is
that of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from outgrow.analysis.effects import Effect, Map, Move, Operand, Sum
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Layout, reduce
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op, Ref

LINEAR = {"sum", "add", "mean"}
EXTREME = {"amax", "amin"}
BY_ROW = "its rows are selected by index"
BY_ENTRY = "an index selects among its units, entry by entry"


def gather(reading: Reading, op: Op) -> Outcome:
    """(x, axis, index): each unit alike if the index was expanded over the units."""
    x, axis, index = op.args[0], op.args[1], op.args[2]
    layout = _rows(reading, op, x, axis % max(len(reading.shape(x)), 1), index)
    return Outcome((layout,), Move((x.value,)), reading.uniform[x.value])


def scatter(reading: Reading, op: Op) -> Outcome:
    """(base, axis, index, source, …): `scatter`, `scatter_add` and `scatter_reduce`."""
    base, axis, index, source = op.args[:4]
    if not isinstance(source, Ref):
        reading.pin_all([base], "single entries of it are overwritten by index", op)
        return Outcome(((),), Move((base.value,)))
    axis %= max(len(reading.shape(base)), 1)
    for ref in (base, source):
        _rows(reading, op, ref, axis, index)
    return _combine(reading, op, base, source, axis, _how(op, 4))


def index_add(reading: Reading, op: Op) -> Outcome:
    """(base, axis, index, source, …): `index_add`, `index_copy` and `index_reduce`."""
    base, axis, _, source = op.args[:4]
    axis %= max(len(reading.shape(base)), 1)
    for ref in (base, source):
        _rows(reading, op, ref, axis, None)
    return _combine(reading, op, base, source, axis, _how(op, 4))


def index_put(reading: Reading, op: Op) -> Outcome:
    """(base, indices, values, accumulate): rows by index; units lie on the axes after the indexed ones."""
    base, indices, source = op.args[:3]
    covered = 0
    for position, index in enumerate(indices):
        if index is not None:
            mask = reading.trace.values[index.value].boolean
            covered = max(covered, position + (len(reading.shape(index)) if mask else 1))
    return _put(reading, op, base, source, covered, "sum" if len(op.args) > 3 and op.args[3] else "copy")


def masked_scatter(reading: Reading, op: Op) -> Outcome:
    """(base, mask, source): rows of the source in the place of those that a mask selects; units lie on the axes after the rows.

    The mask must have been expanded over the units, and the source have the same units last (image features among tokens).
    """
    base, mask, source = op.args
    shape, given, taken = reading.shape(base), reading.shape(mask), reading.shape(source)
    missing = len(shape) - len(given)
    same = {axis + missing for axis in reading.repeated.get(mask.value, frozenset())}
    same |= {axis for axis in range(len(shape)) if axis < missing or given[axis - missing] == 1}
    covered = len(shape)
    while covered - 1 in same and len(shape) - covered < len(taken) and taken[covered - 1 - len(shape)] == shape[covered - 1]:
        covered -= 1
    return _put(reading, op, base, source, covered, "copy")


def _put(reading: Reading, op: Op, base: Ref, source: Ref, covered: int, how: str) -> Outcome:
    """Rows of a base that are replaced by rows of a source, or to which they are added. covered: the axes of the rows."""
    rank = len(reading.shape(base))
    pinned = list(range(covered))
    reading.pin(reading.layout(base), pinned, BY_ROW, op)
    wide = len(reading.shape(source))
    reading.pin(reading.layout(source), list(range(max(wide - (rank - covered), 0))), BY_ROW, op)
    kept = {axis: size for axis, size in enumerate(reading.shape(base)) if axis >= covered}
    sizes = {axis + rank - wide: size for axis, size in enumerate(reading.shape(source)) if axis + rank - wide >= covered}
    layouts = [
        reduce(reading.ties, reading.layout(base), pinned, keepdim=True),
        reduce(reading.ties, reading.spread(source, rank), range(rank - max(wide, rank), covered), keepdim=True),
    ]
    joint = reading.meet(op, [(base, layouts[0], kept), (source, layouts[1], sizes)], reading.shape(base))
    return Outcome((joint,), _effect(reading, base, source, layouts, how))


def _rows(reading: Reading, op: Op, ref: Ref, axis: int, index: Ref | None) -> Layout:
    """An operand's layout without the axis of its rows; axes along which the index varies are pinned."""
    layout = reading.layout(ref)
    reading.pin(layout, [axis], BY_ROW, op)
    apart = [axis]
    if index is not None:
        same = reading.repeated.get(index.value, frozenset())
        sizes = reading.shape(ref), reading.shape(index)
        apart += [a for a in range(len(sizes[0])) if a != axis and (a not in same or sizes[0][a] != sizes[1][a])]
        reading.pin(layout, [a for a in apart if a != axis], BY_ENTRY, op)
    return reduce(reading.ties, layout, apart, keepdim=True)


def _how(op: Op, position: int) -> str:
    """How rows with the same index are combined."""
    name = base_name(op)
    if name in ("index_add", "scatter_add"):
        return "sum"
    named = op.args[position] if len(op.args) > position else op.kwargs.get("reduce", "copy")
    return {"add": "sum", "multiply": "prod"}.get(named, named) if isinstance(named, str) else "copy"


def _combine(reading: Reading, op: Op, base: Ref, source: Ref, axis: int, how: str) -> Outcome:
    """Tie base and source along all axes except for that of the rows."""
    layouts = [reduce(reading.ties, reading.layout(ref), [axis], keepdim=True) for ref in (base, source)]
    operands = []
    for ref, layout in zip((base, source), layouts, strict=True):
        repeated = reading.repeated.get(ref.value, frozenset())
        sizes = {a: size for a, size in enumerate(reading.shape(ref)) if a != axis and a not in repeated}
        operands.append((ref, layout, sizes))
    shape = reading.trace.values[op.outputs[0]].shape
    joint = tuple(block for block in reading.meet(op, operands, shape) if axis not in block.axes)
    return Outcome((joint,), _effect(reading, base, source, layouts, how))


def _effect(reading: Reading, base: Ref, source: Ref, layouts: Sequence[Layout], how: str) -> Effect:
    """The effect: a base of zeros adds nothing to a sum, and rows without a message stay zero."""
    clean = reading.zeros[base.value]
    if how in LINEAR | {"copy"}:
        if clean:
            return Move((source.value,))
        sides = tuple(Operand(ref.value, layout) for ref, layout in zip((base, source), layouts, strict=True))
        return Move((base.value, source.value)) if how == "copy" else Sum(sides)
    inputs = (source.value,) if reading.uniform[base.value] else (base.value, source.value)
    extreme = how in EXTREME
    return Map(inputs, zero=clean, homogeneous=clean and extreme)


RULES = {
    "aten.gather": gather,
    **{f"aten.{name}": scatter for name in ("scatter", "scatter_add", "scatter_reduce")},
    **{f"aten.{name}": index_add for name in ("index_add", "index_copy", "index_reduce")},
    "aten.masked_scatter": masked_scatter,
    **{f"aten.{name}": index_put for name in ("index_put", "_index_put_impl", "_unsafe_index_put")},
}
