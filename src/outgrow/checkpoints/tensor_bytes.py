"""Move the bytes of tensors between files and memory, without mapping files into memory.

Pages of a mapped file count as memory of the process; explicit reads keep the peak under control.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from outgrow.checkpoints.read_checkpoint import MergedTensor, StoredTensor
from outgrow.errors import CheckpointError

PIECE = 2**24  # bytes that are copied at once
MOST = 2**30  # bytes per call: systems read at most 2 GiB at once
WRITE = 2**20  # bytes per call: Linux takes up to ten times as long for more, since it then looks for large pages


class Files:
    """Files that stay open for reading; several threads may read from one at the same time."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}

    def handle(self, path: str) -> int:
        if path not in self._handles:
            self._handles[path] = os.open(path, os.O_RDONLY)
        return self._handles[path]

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])


@contextlib.contextmanager
def open_files(paths: Iterator[str] | tuple[str, ...]) -> Iterator[Files]:
    """Files opened for reading."""
    files = Files()
    try:
        for path in paths:
            files.handle(path)
        yield files
    finally:
        files.close()


def read_tensor(
    files: Files, stored: StoredTensor | MergedTensor, rows: int | None = None, first: int = 0, into: Tensor | None = None
) -> Tensor:
    """The values of a stored tensor; only some of its rows (along axis 0), from `first` on, if `rows` is given.

    into: memory for the values.
    """
    shape = stored.shape if rows is None else (rows, *stored.shape[1:])
    tensor = torch.empty(shape, dtype=stored.dtype) if into is None else into
    target = memory_of(tensor)
    skip = stored.size // stored.shape[0] * first if first else 0
    for part in stored.parts:
        size = min(part.size - skip, len(target))
        if size > 0:
            _read_bytes(files, part, part.start + skip, target[:size])
            target = target[size:]
        skip = max(0, skip - part.size)
    return tensor


def _read_bytes(files: Files, stored: StoredTensor, start: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(files.handle(stored.file), [target[done : done + MOST]], start + done)
        if not count:
            raise CheckpointError(f"{stored.file} became shorter while it was read")
        done += count


def write_tensor(handle: int, tensor: Tensor, start: int) -> None:
    """Write the values of a tensor to an open file."""
    source, done = memory_of(tensor.contiguous()), 0
    while done < len(source):
        done += os.pwrite(handle, source[done : done + WRITE], start + done)


def copy_bytes(files: Files, stored: StoredTensor | MergedTensor, handle: int, start: int) -> None:
    """Copy the bytes of a stored tensor to an open file."""
    for part in stored.parts:
        _copy_part(files, part, handle, start)
        start += part.size


def _copy_part(files: Files, stored: StoredTensor, handle: int, start: int) -> None:
    done = _copied_by_the_system(files.handle(stored.file), stored, handle, start)
    while done < stored.size:
        piece = os.pread(files.handle(stored.file), min(PIECE, stored.size - done), stored.start + done)
        if not piece:
            raise CheckpointError(f"{stored.file} became shorter while it was read")
        written = 0
        while written < len(piece):
            written += os.pwrite(handle, piece[written : written + WRITE], start + done + written)
        done += len(piece)


def _copied_by_the_system(source: int, stored: StoredTensor, handle: int, start: int) -> int:
    """The number of bytes that the system has copied without passing them through memory of the process; 0 if it can't."""
    done = 0
    copy = getattr(os, "copy_file_range", None)
    while copy is not None and done < stored.size:
        try:
            count = copy(source, handle, min(MOST, stored.size - done), stored.start + done, start + done)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            return done
        if not count:
            return done
        done += count
    return done


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
