"""Compute new tensors from stored ones, one at a time, and write them to their places.

Tensors that do not change are copied as bytes. Others are computed in float32 if they are stored with fewer bits, and rounded
once at the end, so that the result does not depend on the number of edits in between.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outgrow.checkpoints.new_values import compute, is_unchanged, origin
from outgrow.checkpoints.plan_checkpoint import CheckpointPlan, NewTensor
from outgrow.checkpoints.tensor_bytes import PIECE, Files, copy_bytes, read_tensor, write_tensor

HALVES = (torch.float16, torch.bfloat16)


class Stream:
    """The new tensors of a planned growth, computed from the files of the old checkpoint."""

    def __init__(self, plan: CheckpointPlan, files: Files) -> None:
        self.plan, self.files = plan, files
        self._stored = {named.name: plan.checkpoint.tensors[named.stored] for named in reversed(plan.names.used)}

    def write(self, tensor: NewTensor, handle: int, start: int) -> None:
        """Write a tensor to an open file."""
        if self._is_copied(tensor):
            copy_bytes(self.files, self._stored[origin(tensor.value)], handle, start)
        else:
            write_tensor(handle, self.values(tensor), start)

    def values(self, tensor: NewTensor) -> Tensor:
        """The values of a new tensor, in the dtype of the file."""
        return compute(tensor.value, self._read).to(tensor.dtype)

    def memory(self, tensor: NewTensor) -> int:
        """An estimate of the bytes that computing a tensor takes: old and new values, and one block in between."""
        if self._is_copied(tensor):
            return PIECE
        return 2 * math.prod(tensor.shape) * max(tensor.dtype.itemsize, 4) + tensor.size

    def _is_copied(self, tensor: NewTensor) -> bool:
        return is_unchanged(tensor.value) and self._stored[origin(tensor.value)].dtype == tensor.dtype

    def _read(self, name: str) -> Tensor:
        tensor = read_tensor(self.files, self._stored[name])
        return tensor.float() if tensor.dtype in HALVES else tensor
