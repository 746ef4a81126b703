"""Compute new tensors from stored ones, one at a time, and write them to their places.

Tensors that do not change are copied as bytes. Others are computed in float32 if they are stored with fewer bits, and rounded
once at the end, so that the result does not depend on the number of edits in between. Large tensors are computed in slabs of
rows where their edits allow it; rows among them that do not change are copied as bytes too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from outgrow.apply.draws import BLOCK, KEPT
from outgrow.apply.final_positions import Positions
from outgrow.checkpoints.buffers import Buffers
from outgrow.checkpoints.new_values import Value, compute, is_unchanged, needs_others, origin
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, NewTensor
from outgrow.checkpoints.read_checkpoint import StoredTensor
from outgrow.checkpoints.row_slabs import ELSEWHERE, Leaf, in_slabs, slabs, stage_of
from outgrow.checkpoints.tensor_bytes import PIECE, Files, copy_bytes, read_tensor, write_tensor

HALVES = (torch.float16, torch.bfloat16)
LARGE = 2**20  # values from which on a tensor is computed in slabs, if its edits allow it
SLAB = 2**19  # values of a slab
SLABS = 10  # slabs in memory at the same time: old, new, drawn and rounded values
COPIED = 2**17  # bytes of neighbouring rows from which on they are copied as bytes


class Stream:
    """The new tensors of a planned growth, computed from the files of the old checkpoint.

    jobs: the number of threads that use it. large, slab: see `LARGE` and `SLAB`.
    """

    def __init__(self, plan: CheckpointPlan, files: Files, jobs: int = 1, large: int = LARGE, slab: int = SLAB) -> None:
        self.plan, self.files, self.large, self.slab = plan, files, large, slab
        self._buffers = Buffers(jobs)
        self._stored = {named.name: plan.checkpoint.tensors[named.stored] for named in reversed(plan.names.used)}

    def write(self, tensor: NewTensor, handle: int, start: int) -> None:
        """Write a tensor to an open file."""
        if self._is_copied(tensor):
            copy_bytes(self.files, self._stored[origin(tensor.value)], handle, start)
        elif self._in_slabs(tensor):
            self._write_slabs(tensor, handle, start)
        else:
            write_tensor(handle, self.values(tensor), start)

    def values(self, tensor: NewTensor) -> Tensor:
        """The values of a new tensor, in the dtype of the file."""
        if needs_others(tensor.value):
            return compute(tensor.value, self._read).to(tensor.dtype)
        found = compute(tensor.value, self._read_again, self._allocate)
        if found.dtype == tensor.dtype:
            return found
        purpose = "stored" if self._stored[origin(tensor.value)].dtype in HALVES else "rounded"
        return self._buffers.take(purpose, tensor.shape, tensor.dtype).copy_(found)

    def memory(self, tensor: NewTensor) -> int:
        """An estimate of the bytes that computing a tensor takes: old and new values, and one block in between."""
        if self._is_copied(tensor):
            return PIECE
        values = math.prod(tensor.shape)
        if self._in_slabs(tensor):
            return SLABS * self.slab * 4 + min(KEPT * BLOCK * 4, 2 * values)
        return 2 * values * max(tensor.dtype.itemsize, 4) + values * tensor.dtype.itemsize

    def _is_copied(self, tensor: NewTensor) -> bool:
        return is_unchanged(tensor.value) and self._stored[origin(tensor.value)].dtype == tensor.dtype

    def _in_slabs(self, tensor: NewTensor) -> bool:
        stored = self._stored[origin(tensor.value)]
        large = math.prod(tensor.shape) >= self.large
        return large and in_slabs(tensor.value, stored.shape, precise(stored.dtype))

    def _write_slabs(self, tensor: NewTensor, handle: int, start: int) -> None:
        stored = self._stored[origin(tensor.value)]

        def read(first: int, count: int) -> Tensor:
            rows = read_tensor(self.files, stored, count, first)
            return rows.to(precise(stored.dtype))

        def whole(value: Value) -> Tensor:
            return compute(value, self._read)

        stage = stage_of(tensor.value, Leaf(read, stored.shape, precise(stored.dtype), whole, self.slab))
        row = tensor.size // tensor.shape[0]
        old = stage.stored(np.arange(tensor.shape[0]))
        if stored.dtype != tensor.dtype or len(stored.parts) > 1:
            old[:] = ELSEWHERE
        for first, count, source in runs_of(old, max(1, COPIED // row)):
            if source == ELSEWHERE:
                for at, rows in slabs(stage, first, count, self.slab):
                    write_tensor(handle, rows.to(tensor.dtype), start + at * row)
            else:
                copy_bytes(self.files, rows_of(stored.parts[0], source, count, row), handle, start + first * row)

    def _allocate(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._buffers.take(f"plan {number}", shape, dtype)

    def _read_again(self, name: str) -> Tensor:
        """The values of a stored tensor, in memory that the next tensor uses again."""
        stored = self._stored[name]
        tensor = read_tensor(self.files, stored, into=self._buffers.take("stored", stored.shape, stored.dtype))
        if stored.dtype not in HALVES:
            return tensor
        return self._buffers.take("old", stored.shape, torch.float32).copy_(tensor)

    def _read(self, name: str) -> Tensor:
        stored = self._stored[name]
        return read_tensor(self.files, stored).to(precise(stored.dtype))


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed."""
    return torch.float32 if dtype in HALVES else dtype


def rows_of(stored: StoredTensor, first: int, count: int, row: int) -> StoredTensor:
    """Some rows of a stored tensor. row: bytes of one."""
    return replace(stored, shape=(count, *stored.shape[1:]), start=stored.start + first * row, size=count * row)


def runs_of(old: Positions, shortest: int) -> list[tuple[int, int, int]]:
    """Runs of rows that are copied, or computed: the first row, how many, and the first stored row or ELSEWHERE.

    old: for each row the stored row that it equals, or ELSEWHERE. Shorter runs than `shortest` are computed.

    Example:
        >>> runs_of(np.array([0, 1, 2, -1, -1, 7, -1, 3, 4]), 2)
        [(0, 3, 0), (3, 4, -1), (7, 2, 3)]
    """
    jumps = (np.diff(old) != 1) & ~((old[1:] == ELSEWHERE) & (old[:-1] == ELSEWHERE))
    jumps |= (old[1:] == ELSEWHERE) != (old[:-1] == ELSEWHERE)
    bounds = [0, *(np.flatnonzero(jumps) + 1).tolist(), len(old)]
    found: list[tuple[int, int, int]] = []
    for start, end in pairwise(bounds):
        source = int(old[start]) if end - start >= shortest else ELSEWHERE
        if source == ELSEWHERE and found and found[-1][2] == ELSEWHERE:
            found[-1] = found[-1][0], end - found[-1][0], ELSEWHERE
        else:
            found.append((start, end - start, source))
    return found
