"""Floating-point operations of a forward pass, from the shapes in its trace (multiply and add count as two)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outgrow.trace.operators import Trace, refs_in

MATMULS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.mv", "aten.addmv", "aten.dot"}

GROUPED = {"aten._grouped_mm", "transformers.grouped_mm_fallback"}  # every row is multiplied by the weight of one expert


def count_flops(trace: Trace, shape: Callable[[int], Sequence[int]]) -> int:
    """Matrix products and convolutions of one pass, as torch.utils.flop_counter counts them."""
    total = 0
    idle = tuple(f"{path}." for paths in trace.idle_peers.values() for path in paths)  # run only for the trace
    for op in trace.ops[: trace.ends[0] if trace.ends else None]:
        if idle and f"{op.module}.".startswith(idle):
            continue
        if op.name in MATMULS:
            left = refs_in(op.args)[-2]
            total += 2 * math.prod(shape(op.outputs[0])) * shape(left.value)[-1]
        elif op.name in GROUPED:
            total += 2 * math.prod(shape(op.outputs[0])) * shape(op.args[0].value)[-1]
        elif op.name == "aten.convolution":
            weight = shape(op.args[1].value)
            places = shape(op.args[0].value if op.args[6] else op.outputs[0])
            total += 2 * math.prod(places) * math.prod(weight[1:])
    return total
