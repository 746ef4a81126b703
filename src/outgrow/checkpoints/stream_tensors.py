"""Compute new tensors from stored ones, one at a time, and write them to their places.

Tensors that do not change are copied as bytes. Others are computed in float32 if they are stored with fewer bits, and rounded
once at the end, so that the result does not depend on the number of edits in between. Where entries are only moved, copied and
drawn, rounding matters for draws alone, and the others stay in half precision. Large tensors are computed in slabs of rows
where their edits allow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from outgrow.apply.grow_tensor import fill_values, grown
from outgrow.checkpoints.buffers import Buffers
from outgrow.checkpoints.new_values import Edited, compute, is_moved_and_drawn, is_unchanged, needs_others, origin
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, NewTensor
from outgrow.checkpoints.row_slabs import in_slabs, slabs
from outgrow.checkpoints.tensor_bytes import PIECE, Files, copy_bytes, read_tensor, write_tensor

HALVES = (torch.float16, torch.bfloat16)
LARGE = 2**27  # values from which on a tensor is computed in slabs, if its edits allow it
SLAB = 2**22  # values of a slab


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
        sliced = self._in_slabs(tensor)
        if self._is_copied(tensor):
            copy_bytes(self.files, self._stored[origin(tensor.value)], handle, start)
        elif sliced is not None:
            self._write_slabs(tensor, sliced, handle, start)
        else:
            write_tensor(handle, self.values(tensor), start)

    def values(self, tensor: NewTensor) -> Tensor:
        """The values of a new tensor, in the dtype of the file."""
        if needs_others(tensor.value):
            return compute(tensor.value, self._read).to(tensor.dtype)
        if self._stays_half(tensor):
            return self._half(tensor)
        found = compute(tensor.value, self._read_again, self._allocate)
        if found.dtype == tensor.dtype:
            return found
        purpose = "stored" if self._stored[origin(tensor.value)].dtype in HALVES else "rounded"
        return self._buffers.take(purpose, tensor.shape, tensor.dtype).copy_(found)

    def _stays_half(self, tensor: NewTensor) -> bool:
        """Whether float32 is needed for draws only."""
        same = self._stored[origin(tensor.value)].dtype == tensor.dtype
        return same and tensor.dtype in HALVES and is_moved_and_drawn(tensor.value)

    def _half(self, tensor: NewTensor) -> Tensor:
        value, stored = tensor.value, self._stored[origin(tensor.value)]
        assert isinstance(value, Edited)
        old = read_tensor(self.files, stored, into=self._buffers.take("stored", stored.shape, stored.dtype))
        new = grown(old, value.edits, new=self._buffers.take("half", tensor.shape, tensor.dtype))
        fill_values(new, old, value.edits, {}, value.seed, value.inits, precision=torch.float32)
        return new

    def memory(self, tensor: NewTensor) -> int:
        """An estimate of the bytes that computing a tensor takes: old and new values, and one block in between."""
        if self._is_copied(tensor):
            return PIECE
        values = math.prod(tensor.shape) if self._in_slabs(tensor) is None else 2 * self.slab
        if self._stays_half(tensor):
            return 2 * values * tensor.dtype.itemsize
        return 2 * values * max(tensor.dtype.itemsize, 4) + values * tensor.dtype.itemsize

    def _is_copied(self, tensor: NewTensor) -> bool:
        return is_unchanged(tensor.value) and self._stored[origin(tensor.value)].dtype == tensor.dtype

    def _in_slabs(self, tensor: NewTensor) -> Edited | None:
        return in_slabs(tensor.value) if math.prod(tensor.shape) >= self.large and len(tensor.shape) > 1 else None

    def unrounded(self, tensor: NewTensor, rows: int | None = None) -> Tensor:
        """The values of a new tensor before they are rounded to the dtype of the file; only the first rows, if requested."""
        sliced = self._in_slabs(tensor)
        if sliced is None:
            return compute(tensor.value, self._read)[:rows] if tensor.shape else compute(tensor.value, self._read)
        rows = tensor.shape[0] if rows is None else rows
        result = torch.empty((rows, *tensor.shape[1:]))
        for first, part in self._slabs_of(tensor, sliced):
            if first >= rows:
                break
            result[first : first + len(part)] = part[: rows - first]
        return result

    def _write_slabs(self, tensor: NewTensor, value: Edited, handle: int, start: int) -> None:
        row = tensor.size // tensor.shape[0]
        for first, rows in self._slabs_of(tensor, value):
            write_tensor(handle, rows.to(tensor.dtype), start + first * row)

    def _slabs_of(self, tensor: NewTensor, value: Edited) -> Iterator[tuple[int, Tensor]]:
        """Rows of a large tensor, slab by slab, with the number of the first."""
        stored = self._stored[origin(value)]
        others = {name: compute(other, self._read) for name, other in value.others.items()}
        step = max(1, self.slab * tensor.shape[0] // math.prod(tensor.shape))

        def read(first: int, count: int) -> Tensor:
            return _precise(read_tensor(self.files, stored, count, first))

        yield from slabs(value, read, tensor.shape[0], step, others)

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
        return _precise(read_tensor(self.files, self._stored[name]))


def _precise(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor
