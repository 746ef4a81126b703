"""Write a file that `torch.load(weights_only=True)` reads, one tensor after the other.

The format of `torch.save`: an uncompressed zip archive with a pickle, which describes the tree of values and refers to tensors
by numbers, and one record of bytes per tensor. Shapes are known before values, so the pickle comes first and only one tensor at
a time is in memory.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outgrow.checkpoints.tensor_bytes import WRITE, memory_of
from outgrow.errors import CheckpointError

ALIGNMENT = 64  # bytes: as torch.save aligns tensors, so that a mapped file can be used in place
LOCAL_HEADER = 30 + 20  # bytes of a record's header without its name and padding; sizes have 64 bits
STORAGES: Mapping[torch.dtype, Any] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


@dataclass(frozen=True, eq=False)
class LaterTensor:
    """A tensor of a tree that is written later. values: returns them, on the CPU."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class _Storage:
    """Stands for the bytes of a tensor in the pickle."""

    tensor: LaterTensor
    number: int


class _TreePickler(pickle.Pickler):
    """Pickles a tree as torch.save does, and collects its tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.found: list[LaterTensor] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, LaterTensor):
            return NotImplemented
        self.found.append(value)
        strides = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(len(value.shape)))
        rebuild: Any = torch._utils._rebuild_tensor_v2
        return rebuild, (_Storage(value, len(self.found) - 1), 0, value.shape, strides, False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        tensor = value.tensor
        return "storage", STORAGES[tensor.dtype], str(value.number), "cpu", math.prod(tensor.shape)


def write_torch_file(path: str, tree: Any, advance: Callable[[int], None] = lambda size: None) -> None:
    """Write a tree of plain values and `LaterTensor`s. advance: called with the bytes of each tensor.

    Example:
        >>> import tempfile
        >>> path = tempfile.mkdtemp() + "/tree.pt"
        >>> write_torch_file(path, {"step": 3, "mean": LaterTensor(torch.float32, (2,), lambda: torch.ones(2))})
        >>> torch.load(path, weights_only=True)
        {'step': 3, 'mean': tensor([1., 1.])}
    """
    text = io.BytesIO()
    pickler = _TreePickler(text)
    pickler.dump(tree)
    with open(path, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _record(archive, "data.pkl", text.getbuffer())
        _record(archive, "byteorder", memoryview(sys.byteorder.encode()))
        for number, tensor in enumerate(pickler.found):
            values = tensor.values()
            if tuple(values.shape) != tensor.shape or values.dtype != tensor.dtype:
                raise CheckpointError(f"{path}: a tensor has the shape {tuple(values.shape)} instead of {tensor.shape}")
            _record(archive, f"data/{number}", memory_of(values.contiguous()))
            advance(tensor.size)
        _record(archive, "version", memoryview(b"3\n"))
        archive.close()
        os.fsync(file.fileno())


def _record(archive: zipfile.ZipFile, name: str, content: memoryview) -> None:
    info = zipfile.ZipInfo(f"archive/{name}")
    file: Any = archive.fp
    padding = -(file.tell() + LOCAL_HEADER + len(info.filename) + 4) % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for start in range(0, len(content), WRITE):
            record.write(content[start : start + WRITE])
