"""Whether a model that the library builds from the new configuration computes with the same numbers as the grown model.

Without weights outputs can't be compared, and equal shapes are not enough: code may derive a factor from a size when it is
built. With `scale_embedding`, PLBart multiplies its embeddings by √d_model; the grown model keeps the factor that it was built
with, and a model built from the new configuration has another one. So both run on the meta device, and their operators are
compared, with the numbers that they are called with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from outgrow.model.example import Example, call
from outgrow.model.known_values import on_meta
from outgrow.model.meta_copy import CachedShapes

Called = tuple[str, tuple[float, ...]]  # an operator, and the numbers among its arguments


class _Scalars(CachedShapes):
    """Records operators and their numbers."""

    def __init__(self) -> None:
        super().__init__(known=True)
        self.found: list[Called] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        numbers = [arg for arg in (*args, *(kwargs or {}).values()) if type(arg) in (int, float)]
        self.found.append((str(func.overloadpacket), tuple(numbers)))
        return super().__torch_dispatch__(func, types, args, kwargs)


def other_scalar(model: nn.Module, rebuilt: nn.Module, inputs: Example) -> str:
    """The first difference between two models on the meta device, in words; "" if there is none."""
    here, there = _recorded(model, inputs), _recorded(rebuilt, inputs)
    for one, other in zip_longest(here, there):
        if one is None or other is None or one[0] != other[0]:
            return f"its code would call {other[0] if other else 'fewer operators'} instead of {one[0] if one else 'none'}"
        for mine, new in zip(one[1], other[1], strict=False):
            if mine != new and not math.isclose(mine, new, rel_tol=1e-6):
                return f"its code would call {one[0]} with {new:.6g} instead of {mine:.6g}"
    return ""


def _recorded(model: nn.Module, inputs: Example) -> list[Called]:
    recorder = _Scalars()
    with recorder, torch.no_grad():
        call(model, on_meta(inputs))
    return recorder.found
