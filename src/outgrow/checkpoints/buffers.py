"""Memory that is used again for one tensor after the other.

A system hands out new memory page by page, and clears each page: that takes longer than writing the values themselves. Each
thread keeps its own buffers, one per purpose; very large ones are released after use.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

KEPT = 2**27  # bytes of a buffer that is kept, over all threads


class Buffers(threading.local):
    """Buffers of the present thread. jobs: the number of threads."""

    def __init__(self, jobs: int = 1) -> None:
        self._most = KEPT // jobs
        self._kept: dict[str, Tensor] = {}

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for a tensor; it is handed out again at the next call with the same purpose.

        Example:
            >>> buffers = Buffers()
            >>> one, other = (buffers.take("old", (2, size), torch.float32) for size in (3, 2))
            >>> one.shape, one.data_ptr() == other.data_ptr()
            (torch.Size([2, 3]), True)
        """
        size = math.prod(shape) * dtype.itemsize
        found = self._kept.get(purpose)
        if found is None or found.numel() < size:
            self._kept.pop(purpose, None)
            found = torch.empty(size, dtype=torch.uint8)
            if size <= self._most:
                self._kept[purpose] = found
        return found[:size].view(dtype).view(shape)
