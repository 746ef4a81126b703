"""Read the values of stored tensors for a comparison of models: in float32, large ones on demand.

A checkpoint in half precision holds the values of a growth rounded once. Whether the growth itself is exact shows in the values
before that; `UnroundedReader` computes them again, and checks that the file holds what they are rounded to. So a comparison has
the narrow limit of float32, and every value of the file that it uses is known to be within half a unit in its last place.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outgrow.checkpoints.plan_checkpoint import NewTensor
from outgrow.checkpoints.read_checkpoint import MergedTensor, StoredTensor
from outgrow.checkpoints.stream_tensors import Stream
from outgrow.checkpoints.tensor_bytes import Files, read_tensor
from outgrow.checkpoints.values_on_demand import OnDemand
from outgrow.errors import CheckpointError, VerifyError

LARGE = 2**22  # values from which on a tensor is read on demand, and those of it that are converted at once


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads stored tensors for a comparison, in float32 if they are stored with fewer bits.

    rounded: a dtype to which values are rounded first. moved: a dtype by one unit in whose last place values are changed, up
    or down at random.
    """

    files: Files
    rounded: torch.dtype | None = None
    moved: torch.dtype | None = None

    def tensor(self, stored: StoredTensor | MergedTensor | None, shape: tuple[int, ...], name: str) -> Tensor | None:
        """The values of a stored tensor, or its first rows if the vocabulary was cut; large ones are read on demand."""
        if stored is None:
            return None
        if stored.shape[1:] != shape[1:] or len(stored.shape) != len(shape) or (shape and shape[0] > stored.shape[0]):
            raise CheckpointError(f"{name} would have the shape {shape}, and {stored.shape} is stored")
        if math.prod(shape) < LARGE:
            return self._values(stored, shape, name)
        return OnDemand(shape, _precise(stored.dtype), lambda: self._values(stored, shape, name))

    def _values(self, stored: StoredTensor | MergedTensor, shape: tuple[int, ...], name: str) -> Tensor:
        result = torch.empty(shape, dtype=_precise(stored.dtype))
        if not shape:
            return result.copy_(read_tensor(self.files, stored))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        step = max(1, LARGE // max(1, math.prod(shape[1:])))
        for first in range(0, shape[0], step):
            part = result.narrow(0, first, min(step, shape[0] - first))
            values = read_tensor(self.files, stored, part.shape[0], first)
            part.copy_(values.to(self.rounded) if self.rounded is not None and values.is_floating_point() else values)
            if self.moved is not None and part.is_floating_point():
                signs = torch.empty(part.shape).uniform_(-1, 1, generator=generator).sign_()
                part.mul_(signs.mul_(torch.finfo(self.moved).eps).add_(1))
        return result


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True, eq=False)
class UnroundedReader(Reader):
    """Computes new values again, before they are rounded. new: what each stored tensor is, by its identity."""

    stream: Stream | None = None
    new: Mapping[int, NewTensor] = field(default_factory=dict)

    def _values(self, stored: StoredTensor | MergedTensor, shape: tuple[int, ...], name: str) -> Tensor:
        assert self.stream is not None
        tensor = self.new[id(stored)]
        values = self.stream.unrounded(tensor, shape[0] if shape else None)
        held = super()._values(stored, shape, name)
        for first in range(0, len(held), LARGE) if shape else (0,):
            part = slice(first, first + LARGE) if shape else ...
            if not torch.equal(values[part].to(tensor.dtype).to(held.dtype), held[part]):
                raise VerifyError(f"{tensor.name}: the file does not hold the values of the growth")
        return values
