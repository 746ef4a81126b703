"""The parameters that a model's outputs depend on.

Operators of a trace list their inputs and outputs, so a walk from the model's outputs back to the parameters finds all that
contribute. A new block that no output depends on would never learn, and comparing outputs can't reveal it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outgrow.errors import MethodError, Problem
from outgrow.trace.operators import Trace


def contributing(trace: Trace) -> set[str]:
    """Names of the parameters and buffers that an output depends on."""
    wanted = set(trace.outputs)
    for op in reversed(trace.ops):
        if not wanted.isdisjoint(op.outputs):
            wanted.update(ref.value for ref in op.refs)
    return {trace.values[value].name for value in wanted} - {""}


def check_reached(trace: Trace, blocks: Iterable[str]) -> None:
    """Refuse new blocks with parameters if no output depends on any of these; trace: of the grown model."""
    found = contributing(trace)
    names = [value.name for value in trace.values if value.kind == "parameter"]
    idle = [block for block in blocks if _all_idle([name for name in names if name.startswith(f"{block}.")], found)]
    if idle:
        reason = "none of the model's outputs on the example depends on the new block, so it would never learn"
        way_out = "deepen elsewhere, or pass an example on which the model uses the output of the block before it"
        raise MethodError("the model can't be deepened there", [Problem(block, reason, way_out) for block in idle])


def _all_idle(names: Sequence[str], found: set[str]) -> bool:
    return bool(names) and found.isdisjoint(names)
