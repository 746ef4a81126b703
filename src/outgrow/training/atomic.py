"""Write a file whole or not at all: a draft beside it, synced to the disk, then renamed over it.

Whatever moment a process dies at, the name holds either the old file or the new one. A draft that a killed process has left
behind is removed by the next write.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Callable

from outgrow.errors import CheckpointError

Path = str | os.PathLike[str]


def place_for(path: Path, usual: str) -> str:
    """Where a file is to be written; CheckpointError if it can't be."""
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"path is {path!r}: name a file, e.g. {usual!r}")
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise CheckpointError(f"{path} is a folder: name a file in it, e.g. {os.path.join(path, usual)}")
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{path}: there is no folder {os.path.dirname(target)}: create it first")
    return target


def write_whole(target: str, write: Callable[[str], None]) -> None:
    """Let `write` fill a draft, and put that in the target's place."""
    folder, name = os.path.split(target)
    _remove_left(folder, name)
    draft = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "wb") as file:  # made here, so that the file gets the usual permissions
            mode = os.fstat(file.fileno()).st_mode
        write(draft)
        os.chmod(draft, mode)
        _sync(draft)
        os.replace(draft, target)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{target} could not be written: {type(error).__name__}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)
    with contextlib.suppress(OSError):  # not every system can sync a folder
        _sync(folder)


def _remove_left(folder: str, name: str) -> None:
    """Remove drafts of processes that are no more."""
    for draft in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.tmp")):
        process = draft.split(".")[-2].partition("-")[0]
        if process.isdecimal() and not _runs(int(process)):
            with contextlib.suppress(OSError):
                os.unlink(draft)


def _runs(process: int) -> bool:
    if os.name != "posix":  # elsewhere this would end it
        return True
    try:
        os.kill(process, 0)
        return True
    except OSError as error:
        return not isinstance(error, ProcessLookupError)


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
