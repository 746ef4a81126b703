"""Write the tensors of a new checkpoint into shards, in a draft directory from which an interrupted growth goes on.

All shapes are known, so headers come first and every tensor has its place in a file; tensors can then be written in any order
and by several threads. Files are named `….part` until they are complete. `done.jsonl` lists the tensors whose bytes are on the
disk; it is written after the bytes have been synced. Its first line identifies the growth, so that a draft of another growth is
not continued.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from outgrow.checkpoints.plan_checkpoint import NewTensor
from outgrow.checkpoints.read_checkpoint import NAMES, WEIGHTS
from outgrow.errors import CheckpointError
from outgrow.process.torch_threads import one_thread

DONE, PART = "done.jsonl", ".part"
SYNC = 2**29  # bytes after which finished tensors are synced to the disk and noted
IN_FLIGHT = 2**28  # bytes of memory for tensors that are computed at the same time, unless one alone needs more
Advance = Callable[[int], None]
WriteTensor = Callable[[NewTensor, int, int], None]  # writes a tensor to an open file, from a position on


@dataclass(frozen=True, eq=False)
class Shard:
    """A file to write: its header, and the position of each tensor."""

    name: str
    header: bytes
    places: Mapping[str, tuple[NewTensor, int]]

    @property
    def size(self) -> int:
        return len(self.header) + sum(tensor.size for tensor, _ in self.places.values())


def lay_out(tensors: Sequence[NewTensor], shard_size: int) -> list[Shard]:
    """Distribute tensors over shards of at most `shard_size` bytes (a larger tensor has a shard of its own)."""
    groups: list[list[NewTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.size > shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.size
    if len(groups) == 1:
        return [_shard(WEIGHTS, groups[0])]
    return [_shard(f"model-{n:05d}-of-{len(groups):05d}.safetensors", group) for n, group in enumerate(groups, 1)]


def _shard(name: str, tensors: Sequence[NewTensor]) -> Shard:
    """The header of a shard; wide dtypes come first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start, starts = 0, []
    for tensor in ordered:
        starts.append(start)
        for part, shape in tensor.entries:
            end = start + math.prod(shape) * tensor.dtype.itemsize
            entries[part] = {"dtype": NAMES[tensor.dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(name, header, {one.name: (one, len(header) + at) for one, at in zip(ordered, starts, strict=True)})


def index_of(shards: Sequence[Shard]) -> bytes | None:
    """The contents of the index file; None for a single file."""
    if len(shards) == 1:
        return None
    total = sum(tensor.size for shard in shards for tensor, _ in shard.places.values())
    places = {part: shard.name for shard in shards for tensor, _ in shard.places.values() for part, _ in tensor.entries}
    return (json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n").encode()


@dataclass(eq=False)
class Draft:
    """The draft directory of a growth."""

    folder: str
    identity: str
    done: set[str] = field(default_factory=set)

    @property
    def _log(self) -> str:
        return os.path.join(self.folder, DONE)

    def begin(self, shards: Sequence[Shard]) -> None:
        """Create the directory and all headers, or go on with those of the same growth."""
        os.makedirs(self.folder, exist_ok=True)
        self.done = self._noted()
        if not self.done:
            for name in os.listdir(self.folder):
                os.unlink(os.path.join(self.folder, name))
            with open(self._log, "w", encoding="utf-8") as log:
                log.write(json.dumps({"growth": self.identity}) + "\n")
        for shard in shards:
            if not os.path.exists(self.path(shard)):
                self._create(shard)

    def _create(self, shard: Shard) -> None:
        self.done -= set(shard.places)
        with open(self.path(shard), "wb") as file:
            file.write(shard.header)
            file.flush()
            if hasattr(os, "posix_fallocate"):  # a full disk is found at once, and the file has few fragments
                os.posix_fallocate(file.fileno(), 0, shard.size)
            else:
                file.truncate(shard.size)

    def path(self, shard: Shard) -> str:
        """The shard's file: without the ending .part once it is complete."""
        whole = os.path.join(self.folder, shard.name)
        return whole if os.path.exists(whole) else whole + PART

    def _noted(self) -> set[str]:
        try:
            with open(self._log, encoding="utf-8") as log:
                lines = [json.loads(line) for line in log if line.endswith("\n")]
        except (OSError, ValueError):
            return set()
        return set(lines[1:]) if lines and lines[0] == {"growth": self.identity} else set()

    def note(self, names: Sequence[str]) -> None:
        """Note tensors whose bytes are on the disk."""
        with open(self._log, "a", encoding="utf-8") as log:
            log.writelines(json.dumps(name) + "\n" for name in names)
            log.flush()
            os.fsync(log.fileno())
        self.done.update(names)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Create a draft directory that no other process uses in the meantime; it is removed again if it stays empty."""
    os.makedirs(folder, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(ImportError):  # Windows has no such locks
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another process is writing to {folder}: wait for it, or name another directory"
                ) from error
        yield
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def write_shards(
    draft: Draft,
    shards: Sequence[Shard],
    write: WriteTensor,
    memory: Callable[[NewTensor], int],
    jobs: int = 1,
    advance: Advance = lambda size: None,
) -> None:
    """Write all tensors that the draft does not have yet. memory: bytes that computing a tensor takes."""
    for shard in shards:
        path = draft.path(shard)
        if path.endswith(PART):
            with one_thread():
                _write_shard(draft, shard, path, write, memory, jobs, advance)
            os.replace(path, path.removesuffix(PART))
        else:
            advance(sum(tensor.size for tensor, _ in shard.places.values()))


def _write_shard(
    draft: Draft,
    shard: Shard,
    path: str,
    write: WriteTensor,
    memory: Callable[[NewTensor], int],
    jobs: int,
    advance: Advance,
) -> None:
    handle = os.open(path, os.O_WRONLY)
    try:
        for tensor, _ in shard.places.values():
            if tensor.name in draft.done:
                advance(tensor.size)
        left = [(tensor, at) for tensor, at in shard.places.values() if tensor.name not in draft.done]
        with _Syncing(draft, handle) as syncing:
            for tensor in _in_parallel(left, lambda one, at: write(one, handle, at), memory, jobs):
                advance(tensor.size)
                syncing.add(tensor)
    finally:
        os.close(handle)


class _Syncing:
    """Syncs and notes finished tensors in a thread of its own, while others are computed; all of them at the end."""

    def __init__(self, draft: Draft, handle: int) -> None:
        self.draft, self.handle, self.fresh = draft, handle, list[NewTensor]()
        self.pool, self.running = ThreadPoolExecutor(1), list[Future[None]]()

    def __enter__(self) -> _Syncing:
        return self

    def add(self, tensor: NewTensor) -> None:
        self.fresh.append(tensor)
        if sum(one.size for one in self.fresh) >= SYNC:
            self._start()

    def _start(self) -> None:
        while self.running:  # what waits for the disk is bounded
            self.running.pop().result()
        names = [one.name for one in self.fresh]
        self.fresh.clear()
        self.running.append(self.pool.submit(self._sync, names))

    def _sync(self, names: Sequence[str]) -> None:
        os.fsync(self.handle)
        self.draft.note(names)

    def __exit__(self, *raised: object) -> None:
        try:
            self._start()
            self.running.pop().result()
        finally:
            self.pool.shutdown()


def _in_parallel(
    work: Sequence[tuple[NewTensor, int]],
    write: Callable[[NewTensor, int], None],
    memory: Callable[[NewTensor], int],
    jobs: int,
) -> Iterator[NewTensor]:
    """Write tensors with several threads, as long as their memory fits; yields each tensor when it is written."""
    if jobs == 1:
        for tensor, at in work:
            write(tensor, at)
            yield tensor
        return
    stop = threading.Event()

    def one(tensor: NewTensor, at: int) -> None:
        if not stop.is_set():
            write(tensor, at)

    running: dict[Future[None], NewTensor] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for tensor, at in work:
                while running and (len(running) >= jobs or _needed(running, memory) + memory(tensor) > IN_FLIGHT):
                    yield from _completed(running)
                running[pool.submit(one, tensor, at)] = tensor
            while running:
                yield from _completed(running)
        except BaseException:
            stop.set()
            raise


def _needed(running: Mapping[Future[None], NewTensor], memory: Callable[[NewTensor], int]) -> int:
    return sum(memory(tensor) for tensor in running.values())


def _completed(running: dict[Future[None], NewTensor]) -> Iterator[NewTensor]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        tensor = running.pop(future)
        future.result()
        yield tensor
