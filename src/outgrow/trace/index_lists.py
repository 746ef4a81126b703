"""Positions that a model's code writes as a list: `qkv[..., [-2], :]`, the keys of Falcon's packed q, k and v.

Torch makes a tensor of the list on the device of the indexed tensor. On the meta device its values are lost before any operator
runs, so a model that indexes with lists is recorded again, with lists that are turned into known tensors first. This takes a
`TorchFunctionMode`, which is slow: it is used only for models that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from outgrow.trace.operators import Ref, Trace

MOST = 64  # entries of a list that is kept


class ListIndices(TorchFunctionMode):
    """Reports each tensor that stands for a list among indices, with its integers."""

    def __init__(self, report: Callable[[Tensor, tuple[int, ...]], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(map(_is_list, parts)):
                args = x, tuple(self._tensor(part, x) if _is_list(part) else part for part in parts)
        return func(*args, **(kwargs or {}))

    def _tensor(self, part: list[int], indexed: Tensor) -> Tensor:
        with _disable_current_modes():
            made = torch.tensor(part, device=indexed.device)
        self.report(made, tuple(part))
        return made


def _is_list(part: Any) -> bool:
    return isinstance(part, list) and 0 < len(part) <= MOST and all(type(item) is int for item in part)


def has_unknown_lists(trace: Trace) -> bool:
    """Whether an operator of a trace on the meta device indexes with integers that the code made, of unknown values."""
    if not trace.meta or trace.lists:
        return False
    indices = (item for op in trace.ops if op.name == "aten.index" for item in op.args[1])
    values = (trace.values[item.value] for item in indices if isinstance(item, Ref))
    return any(value.kind == "constant" and not (value.floating or value.boolean) for value in values)
