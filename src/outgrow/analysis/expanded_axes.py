"""Axes along which the entries of a tensor repeat, because it was expanded there.

`count.view(-1, 1).expand_as(x)` has the size of `x` along its last axis, but no separate value for each index. Such an
axis carries no units, and it can be combined with units without fixing their number: in the grown model the same code expands
it further. Index tensors of `gather` and `scatter` are often expanded like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outgrow.trace.operators import Op, Ref, Trace

ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in """
    alias clone contiguous detach _to_copy lift_fresh lift_fresh_copy add sub rsub mul div neg abs sqrt rsqrt pow reciprocal exp
    log clamp clamp_min clamp_max where eq ne lt le gt ge logical_not logical_and logical_or masked_fill sigmoid tanh relu
""".split()
)


STATISTICS = {f"aten.{name}" for name in ("sum", "mean", "amax", "amin", "linalg_vector_norm", "norm", "var", "std")}


def repeated_axes(op: Op, trace: Trace, known: Mapping[int, frozenset[int]], uniform: Sequence[bool] = ()) -> frozenset[int]:
    """The axes of an operator's (only) result along which all its entries are equal by construction.

    uniform: for each value, whether all its entries are equal, such as `torch.zeros(1, heads, queries, keys)`: added to a mask
    that all heads share, they repeat along the heads.
    """
    if len(op.outputs) != 1:
        return frozenset()
    shape = trace.values[op.outputs[0]].shape
    if op.name in ("aten.expand", "aten.repeat"):
        return _expanded(op.args[0], shape, trace, known)
    even = [ref for ref in op.refs if uniform and uniform[ref.value]]
    if not even and not any(ref.value in known for ref in op.refs):
        return frozenset()
    if op.name in ("aten.unsqueeze", "aten.transpose", "aten.t"):
        if op.args[0].value not in known:
            return frozenset()
        return _moved(op, len(shape), known[op.args[0].value])
    if op.name in STATISTICS:
        before = trace.values[op.args[0].value].shape
        kept = known.get(op.args[0].value, frozenset()) if len(before) == len(shape) else frozenset()
        return frozenset(axis for axis in kept if before[axis] == shape[axis])
    if op.name.removesuffix("_") in ELEMENTWISE:
        common = [_expanded(ref, shape, trace, known) for ref in op.refs if ref not in even]
        return frozenset.intersection(*common) if common else frozenset()
    return frozenset()


def _expanded(ref: Ref, shape: tuple[int, ...], trace: Trace, known: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Axes of a broadcast result along which an operand does not vary."""
    mine = trace.values[ref.value].shape
    missing = len(shape) - len(mine)
    repeated = {axis + missing for axis in known.get(ref.value, ())}
    return frozenset(
        axis
        for axis, size in enumerate(shape)
        if size > 1 and (axis < missing or mine[axis - missing] == 1 or axis in repeated)
    )


def _moved(op: Op, rank: int, axes: frozenset[int]) -> frozenset[int]:
    if op.name == "aten.unsqueeze":
        new = op.args[1] % rank
        return frozenset(axis + (axis >= new) for axis in axes)
    first, second = (0, 1) if len(op.args) < 3 else (op.args[1] % rank, op.args[2] % rank)
    return frozenset({first: second, second: first}.get(axis, axis) for axis in axes)
