"""Write a file completely or not at all: write a draft in the same folder, sync it to the disk, rename it to the file.

If the process dies at any moment, the file is either the old one or the new one. The next write removes the draft of a killed
process.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import stat
import zlib
from collections.abc import Callable
from typing import Any

from outgrow.errors import CheckpointError, GrowthError

Path = str | os.PathLike[str]


def check_path(path: Any, call: str, kind: type[GrowthError] = CheckpointError) -> None:
    """Raise if an argument can't be the path of a file. call: an example of a correct call.

    Example:
        >>> check_path(3, "f('x.pt')")
        Traceback (most recent call last):
        ...
        outgrow.errors.CheckpointError: a path must be a string or a pathlib.Path, and not of type int: write e.g. f('x.pt')
    """
    if isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str):
        text = os.fspath(path)
        if not text or "\0" in text:
            raise kind(f"{path!r} can't be the name of a file: write e.g. {call}")
        if text.startswith("~") and not os.path.exists(text.replace(os.sep, "/").partition("/")[0]):
            raise kind(f"{path}: Python does not expand '~' in paths: write os.path.expanduser({text!r})")
        return
    if hasattr(path, "read") or hasattr(path, "write"):
        raise kind(f"an open file was given instead of a path ({type(path).__name__}): write e.g. {call}")
    raise kind(f"a path must be a string or a pathlib.Path, and not {_named(path)}: write e.g. {call}")


def _named(thing: Any) -> str:
    return "None" if thing is None else f"of type {type(thing).__name__}"


def place_for(path: Path, call: str) -> str:
    """The real path of a file to write; CheckpointError if it can't be written. call: an example of a correct call."""
    check_path(path, call)
    target = os.path.realpath(path)
    if os.path.isdir(target):
        raise CheckpointError(f"{path} is a folder: name a file in it, e.g. {call}")
    if not os.path.isdir(os.path.dirname(target)):
        raise CheckpointError(f"{path}: there is no folder {os.path.dirname(target)}: create it first")
    if os.path.exists(target) and not os.path.isfile(target):
        raise CheckpointError(f"{path} is a device or a pipe, and would be replaced by a file: name a file, e.g. {call}")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise CheckpointError(f"{path} is write-protected: name another file, or change its permissions with os.chmod")
    return target


def write_plain(path: Path, data: bytes, kind: type[GrowthError] = GrowthError) -> None:
    """Write a small file directly, without a draft; if that fails, the error says what to do."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        if os.path.isdir(path):
            raise kind(f"{path} is a folder: name a file in it") from error
        if not os.path.isdir(folder):
            raise kind(f"{path}: there is no folder {folder}: create it first") from error
        raise kind(f"{path} can't be written: {error.strerror or error}") from error


def write_whole(target: str, write: Callable[[str], None]) -> None:
    """Let `write` fill a draft, and replace the target by it, with the permissions of the existing file."""
    folder, name = os.path.split(target)
    name = _short(name)
    _remove_old_drafts(folder, name)
    draft = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "wb") as file:  # created here, so that a new file gets the default permissions
            mode = os.fstat(file.fileno()).st_mode
        if os.path.exists(target):
            mode = stat.S_IMODE(os.stat(target).st_mode)
            os.chmod(draft, mode)
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


def _short(name: str) -> str:
    """A file's name, shortened so that the longer names of drafts fit into the 255 bytes that file systems allow."""
    return name if len(os.fsencode(name)) <= 200 else f"{name[:40]}-{zlib.crc32(os.fsencode(name)):08x}"


def _remove_old_drafts(folder: str, name: str) -> None:
    """Remove drafts of processes that have ended."""
    for draft in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.tmp")):
        process = draft.split(".")[-2].partition("-")[0]
        if process.isdecimal() and not _is_running(int(process)):
            with contextlib.suppress(OSError):
                os.unlink(draft)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # elsewhere, os.kill(process, 0) would end it
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
