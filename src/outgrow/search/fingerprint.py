"""What a search's parent computes, apart from its weights, so that a study is not continued with another parent.

Parents of equal shapes may differ in an activation, in the number of heads or in an ε. Each worker builds its own, often with
other random weights, so outputs can't be compared. What is compared are the operators of one pass: their names, and the numbers
in their arguments, in any order. The pass is recorded on the meta device, where nothing depends on the machine, on threads or
on weights, and only passes with the same versions of libraries, types and shapes of the example are compared.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from outgrow.analysis.analyse import watch
from outgrow.errors import SearchError
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example, tensors_in
from outgrow.model.sandbox import random_state
from outgrow.model.unwrap import bare
from outgrow.trace.operators import Ref, Trace


def fingerprint(model: nn.Module, example: Example) -> dict[str, Any] | None:
    """Plain data; None if the pass depends on values of the weights, so that it can't be recorded without them.

    Example:
        >>> import torch
        >>> x = torch.zeros(2, 4)
        >>> one, other = (fingerprint(nn.Sequential(nn.Linear(4, 4), kind()), x) for kind in (nn.ReLU, nn.Tanh))
        >>> one["operators"], one["conditions"] == other["conditions"], one["digest"] == other["digest"]
        ({'aten.addmm': 1, 'aten.relu': 1, 'aten.t': 1}, True, False)
    """
    model = bare(model)
    with uncompiled(), random_state():
        trace = watch(model, example)
    if not trace.meta:
        return None
    calls = sorted(f"{op.name} {_plain(op.args)} {_plain(dict(op.kwargs))}" for op in trace.ops)
    names = Counter(op.name for op in trace.ops)
    return {
        "conditions": _digest(_conditions(model, example, trace)),
        "digest": _digest(calls),
        "operators": {name: names[name] for name in sorted(names)},
    }


def check_same(name: str, begun: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> None:
    """Raise if a study was begun with a parent that computes something else."""
    if not begun or not now or begun["conditions"] != now["conditions"] or begun["digest"] == now["digest"]:
        return
    counts = [Counter(side["operators"]) for side in (begun, now)]
    only = [", ".join(one - other) for one, other in (counts, counts[::-1])]
    if any(only):
        difference = f"its operators differ (there {only[0] or 'none more'}; here {only[1] or 'none more'})"
    else:
        difference = "the numbers in its code differ, such as a slope, an ε or the number of heads"
    raise SearchError(
        f"the study {name!r} was begun with a parent that computes something else: {difference}. The study is as it was: "
        "continue it with the parent that it was begun with, or name another study"
    )


def _plain(argument: Any) -> Any:
    """An argument of an operator without what depends on the machine; real numbers are rounded, since they may be computed."""
    if isinstance(argument, Ref):
        return "tensor"
    if isinstance(argument, (tuple, list)):
        return [_plain(item) for item in argument]
    if isinstance(argument, dict):
        return {name: _plain(value) for name, value in sorted(argument.items()) if name not in ("device", "pin_memory")}
    if isinstance(argument, float):
        return f"{argument:.6g}"
    return argument if isinstance(argument, (bool, int, str)) or argument is None else ""


def _conditions(model: nn.Module, example: Example, trace: Trace) -> list[str]:
    """All that may change the operators although the model is the same."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} | {"torch"}
    versions = [f"{name} {getattr(sys.modules.get(name), '__version__', '')}" for name in sorted(packages)]
    types = sorted({str(tensor.dtype) for tensor in (*model.parameters(), *model.buffers())})
    given = [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors_in(example)]
    if trace.known:  # the pass has used integers and masks of the example
        given += [str(t.tolist()) for t in tensors_in(example) if not t.is_meta and not t.is_floating_point()]
    return [*versions, *types, *given]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
