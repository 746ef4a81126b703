"""Places where a model's code reads a value of a tensor, as in `if x.abs().max() < 8:`.

Such code may branch on the value. The trace and the check cover only the branch that the example takes; another branch may use
the grown units differently. So the report names the place.
"""

from __future__ import annotations

from outgrow.trace.operators import Trace

NOTE = "the example decides what runs"
READ = "aten._local_scalar_dense"
SHOWN = 3


def note(trace: Trace) -> list[str]:
    """A report line if code reads values computed from floating-point tensors; masks and positions do not count."""
    maker = {output: op for op in trace.ops for output in op.outputs}

    def comes_from_floats(value: int) -> bool:
        todo, seen = [value], set[int]()
        while todo:
            value = todo.pop()
            if trace.values[value].floating:
                return True
            if value in maker and value not in seen:
                seen.add(value)
                todo.extend(ref.value for ref in maker[value].refs)
        return False

    reads = (op for op in trace.ops if op.name == READ)
    places = list(dict.fromkeys(op.module or "the model" for op in reads if any(comes_from_floats(r.value) for r in op.refs)))
    if not places:
        return []
    more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
    return [
        f"{NOTE}: the code of {', '.join(places[:SHOWN])}{more} reads values of tensors; where it branches on them, only what "
        "the example runs was analysed and compared"
    ]
