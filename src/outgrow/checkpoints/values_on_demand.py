"""Parameters whose values are read from files whenever an operator uses them, and released after it.

A model with such parameters computes what it would compute with all values in memory, but holds one large tensor at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Read = Callable[[], Tensor]


class OnDemand(Tensor):
    """A tensor without memory. Operators get the result of `read` in its place.

    Example:
        >>> weight = torch.nn.Parameter(OnDemand((2, 3), torch.float32, lambda: torch.ones(2, 3)), False)
        >>> torch.nn.functional.linear(torch.ones(1, 3), weight)
        tensor([[3., 3.]])
    """

    read: Read

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, read: Read) -> OnDemand:
        made: OnDemand = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.read = read
        return made

    def __init__(self, *given: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten.detach.default:  # nn.Parameter does it
            return cls(args[0].shape, args[0].dtype, args[0].read)
        read = tree_map_only(OnDemand, lambda tensor: tensor.read(), (args, dict(kwargs or {})))
        return operator(*read[0], **read[1])
