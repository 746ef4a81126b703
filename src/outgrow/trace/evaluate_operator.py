"""Evaluate single operators of a trace on given values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outgrow.trace.operators import Op, Ref


def evaluated(op: Op, x: torch.Tensor) -> torch.Tensor:
    """The first result of an operator with a tensor in place of its tensor arguments."""
    return results_of(op, x)[0]


def results_of(op: Op, x: torch.Tensor) -> Sequence[torch.Tensor]:
    function = getattr(torch.ops.aten, base_name(op))
    result: Any = function(*(x if isinstance(arg, Ref) else arg for arg in op.args), **dict(op.kwargs))
    return result if isinstance(result, (tuple, list)) else (result,)


def base_name(op: Op) -> str:
    return op.name.removeprefix("aten.").removesuffix("_")
