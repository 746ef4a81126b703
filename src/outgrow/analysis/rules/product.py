"""Contractions: matrix products, convolutions, attention's q·k and scores·v.

All are one operation: two tensors are multiplied along the axes that they share, and summed over some of these. Axes are named
by integers common to both operands; a grouped convolution, for example, is x[b, g, i] · w[g, o, i] summed over i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outgrow.analysis.effects import Contract, Operand
from outgrow.analysis.interpret_trace import Outcome, Reading
from outgrow.analysis.labels import Layout, meet, permute, reduce, renumber, reshape, tie_all
from outgrow.trace.operators import Op, Ref, refs_in


def contract(
    reading: Reading,
    op: Op,
    left: tuple[Ref, Layout, Sequence[int], Sequence[int]],
    right: tuple[Ref, Layout, Sequence[int], Sequence[int]],
    out: Sequence[int],
) -> tuple[Layout, Contract]:
    """Layout and effect of a contraction. Each side: reference, layout, common names of its axes, sizes; `out`: result."""
    sides = []
    size_of: dict[int, int] = {}
    for ref, layout, names, sizes in (left, right):
        order = dict(enumerate(names))
        named = rename(layout, order)
        size_of.update({name: max(size, size_of.get(name, 1)) for name, size in zip(names, sizes, strict=True)})
        sides.append((ref, named, dict(zip(names, sizes, strict=True))))
    shared = {name for name in sides[0][2] if name in sides[1][2]}
    contracted = {name for name in shared if name not in out}
    shape = [size_of.get(name, 1) for name in range(max(size_of) + 1)]
    met = [(ref, layout, {n: s for n, s in sizes.items() if n in shared}) for ref, layout, sizes in sides]
    free = reading.growable_layouts(op, met)
    tie_all(reading.ties, free)
    kept = [reduce(reading.ties, layout, contracted, keepdim=True) for layout in free]
    joint = meet(reading.ties, kept, shape)
    result = rename(joint, {name: axis for axis, name in enumerate(out)})
    effect = Contract(Operand(sides[0][0].value, sides[0][1]), Operand(sides[1][0].value, sides[1][1]), frozenset(contracted))
    return result, effect


def rename(layout: Layout, names: Mapping[int, int]) -> Layout:
    """The same labels under other axis numbers, in any order."""
    pieces: Layout = ()
    for block in layout:
        renamed = [names[axis] for axis in block.axes]
        if renamed == sorted(renamed):
            pieces += renumber((block,), names.__getitem__)
        else:
            order = sorted(range(len(renamed)), key=renamed.__getitem__)
            compact = renumber((block,), list(block.axes).index)
            (turned,) = permute(compact, order)
            pieces += renumber((turned,), sorted(renamed).__getitem__)
    return pieces


def mm(reading: Reading, op: Op) -> Outcome:
    """mm, bmm, mv, dot and their `add` forms: n·k × k·m, with a batch axis before if there is one."""
    refs = refs_in(op.args)
    bias = refs[0] if len(refs) == 3 else None
    a, b = refs[-2:]
    shapes = reading.shape(a), reading.shape(b)
    batch = [0] if len(shapes[0]) == 3 else []
    left = [*batch, 1, 2] if len(shapes[0]) > 1 else [2]
    right = [*batch, 2, 3] if len(shapes[1]) > 1 else [2]
    out = [name for name in (*batch, 1, 3) if name in left or name in right]
    layout, effect = contract(
        reading, op, (a, reading.layout(a), left, shapes[0]), (b, reading.layout(b), right, shapes[1]), out
    )
    if bias is not None:
        layout, effect = add_bias(reading, op, bias, layout, a, effect)
    return Outcome((layout,), effect)


def add_bias(
    reading: Reading, op: Op, bias: Ref, layout: Layout, beside: Ref, effect: Contract, axis: int | None = None
) -> tuple[Layout, Contract]:
    """Add a bias, which writes the same units as the product; its last axis is `axis` of the result."""
    shape = reading.trace.values[op.outputs[0]].shape
    shift = len(shape) - len(reading.shape(bias)) if axis is None else axis
    spread = renumber(reading.layout(bias), lambda a: a + shift)
    sizes = {a + shift: size for a, size in enumerate(reading.shape(bias))}
    joint = reading.meet(op, [(beside, layout, dict(enumerate(shape))), (bias, spread, sizes)], shape)
    return joint, replace(effect, bias=bias.value)


def convolution(reading: Reading, op: Op) -> Outcome:
    """Convolutions of any rank, transposed, grouped or depthwise.

    weight: (out, in/groups, k…), or (in, out/groups, k…) if transposed.
    """
    x, weight = op.args[0], op.args[1]
    bias = op.args[2] if isinstance(op.args[2], Ref) else None
    transposed, groups = op.args[6], op.args[8]
    x_shape, w_shape = reading.shape(x), reading.shape(weight)
    out_shape = reading.trace.values[op.outputs[0]].shape
    batch, channels, *space = x_shape
    kernel = list(range(10, 10 + len(space)))  # axes of the kernel and of the image are not shared
    places = list(range(20, 20 + len(space)))
    reading.pin(reading.layout(x), list(range(2, len(x_shape))), "a convolution slides over it", op)
    reading.pin(reading.layout(weight), list(range(2, len(w_shape))), "it is the size of a convolution kernel", op)
    x_layout = reduce(reading.ties, reading.layout(x), range(2, len(x_shape)), keepdim=True)
    w_layout = reduce(reading.ties, reading.layout(weight), range(2, len(w_shape)), keepdim=True)
    x_wide = (batch, groups, channels // groups, *space)
    x_layout = reshape(reading.ties, x_layout, x_shape, x_wide)
    w_wide = (groups, w_shape[0] // groups, *w_shape[1:])
    w_layout = reshape(reading.ties, w_layout, w_shape, w_wide)
    names = [1, 2, 3, *kernel] if transposed else [1, 3, 2, *kernel]
    left = (x, x_layout, [0, 1, 2, *places], x_wide)
    right = (weight, w_layout, names, w_wide)
    layout, effect = contract(reading, op, left, right, [0, 1, 3, *places])
    per_group = out_shape[1] // groups
    layout = reshape(reading.ties, layout, (out_shape[0], groups, per_group, *out_shape[2:]), out_shape)
    if bias is not None:
        layout, effect = add_bias(reading, op, bias, layout, x, effect, axis=1)
    return Outcome((layout,), effect)


RULES = {
    **{f"aten.{name}": mm for name in "mm bmm mv dot vdot addmm baddbmm addmv".split()},
    "aten.convolution": convolution,
}
