"""Uniform draws: by torch's generator for few values; for many values in blocks, each with a seed of its own.

Blocks are three times faster than torch's generator on the CPU, and any part of a large tensor can be drawn without the values
before it, which the streaming of checkpoints needs. A block is the raw output of numpy's SFC64, whose stream is the same in all
versions of numpy: 32 bits per value, as a signed integer i, which becomes i·bound/2³¹.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**18  # values per seed
MANY = 2**20  # draws of a tensor from which on they are made in blocks
KEPT = 64  # blocks that are kept if they are used again
BLOCK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def draws_in_blocks(count: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether so many draws are made in blocks; otherwise they are one sequence of torch's generator."""
    return count >= MANY and device.type == "cpu" and dtype in BLOCK_DTYPES


def fill_in_blocks(target: Tensor, bound: float, seed: int) -> None:
    """Fill a tensor with uniform values between −bound and bound, in the order of its indices."""
    if target.is_contiguous():
        flat = target.view(-1)
        for start in range(0, len(flat), BLOCK):
            part = flat[start : start + BLOCK]
            part.copy_(block(seed, start // BLOCK)[: len(part)].float().mul_(bound / 2**31))
        return
    blocks = Blocks(seed)
    inner = math.prod(target.shape[1:])
    step = max(1, BLOCK // max(inner, 1))
    for first in range(0, target.shape[0], step):
        rows = target.narrow(0, first, min(step, target.shape[0] - first))
        rows.copy_(blocks.values(first * inner, rows.numel(), bound).view(rows.shape))


def block(seed: int, number: int) -> Tensor:
    """The values of a block, as integers of 32 bits."""
    bits = np.random.SFC64(np.random.SeedSequence((seed, number))).random_raw(BLOCK // 2)
    return torch.from_numpy(bits.astype("<u8", copy=False).view("<i4"))


class Blocks:
    """Parts of the sequence of blocks with one seed. keep: number of blocks that are kept for further parts."""

    def __init__(self, seed: int, keep: int = 1) -> None:
        self._seed, self._keep = seed, keep
        self._kept: dict[int, Tensor] = {}

    def values(self, start: int, count: int, bound: float) -> Tensor:
        """Values between −bound and bound from a position on, in memory that may be changed.

        Example:
            >>> all_values, part = Blocks(1).values(0, BLOCK + 4, 0.5), Blocks(1).values(BLOCK - 1, 3, 0.5)
            >>> torch.equal(part, all_values[BLOCK - 1 : BLOCK + 2])
            True
        """
        result, done = torch.empty(count), 0
        while done < count:
            number, offset = divmod(start + done, BLOCK)
            if number not in self._kept:
                while len(self._kept) >= self._keep:
                    del self._kept[next(iter(self._kept))]
                self._kept[number] = block(self._seed, number)
            size = min(BLOCK - offset, count - done)
            result[done : done + size] = self._kept[number][offset : offset + size]
            done += size
        return result.mul_(bound / 2**31)


class Draws:
    """The draws of one insertion, of which any rows (along axis 0) can be read.

    shape: of all draws. dtype: float32 or float64. factor: for all draws. again: whether rows are read more than once.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, bound: float, seed: int, factor: float = 1.0, again: bool = False
    ) -> None:
        self._inner, self._bound, self._factor = shape[1:], bound, factor
        count, device = math.prod(shape), torch.device("cpu")
        self._blocks = Blocks(seed, KEPT if again else 1) if draws_in_blocks(count, dtype, device) else None
        self._whole = torch.empty(0)
        if self._blocks is None:
            generator = torch.Generator().manual_seed(seed)
            self._whole = torch.empty(shape, dtype=dtype).uniform_(-bound, bound, generator=generator)

    def rows(self, first: int, count: int) -> Tensor:
        """Neighbouring rows, in memory that may be changed."""
        if self._blocks is None:
            found = self._whole.narrow(0, first, count).clone()
        else:
            size = math.prod(self._inner)
            found = self._blocks.values(first * size, count * size, self._bound).view(count, *self._inner)
        return found if self._factor == 1.0 else found.mul_(self._factor)
