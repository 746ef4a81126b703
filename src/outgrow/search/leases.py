"""Leases of running trials: which of them still have a living worker.

A worker writes a lease into the attributes of the trial that it runs, and renews it from a thread: `{"owner", "place",
"process", "started", "beat"}`. A trial is stale if its worker ran on this machine and its process has ended, or if `beat` has
not changed for `patience` seconds of the observer's own clock: clocks of different machines are never compared. This works on
all storages of Optuna; only those for databases have heartbeats of their own.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


def place() -> str:
    """This machine: its name, and where it exists, the namespace of process numbers (containers have their own)."""
    try:
        return f"{platform.node()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def start_of(process: int) -> str:
    """When a process was started, so that another one with the same number is not mistaken for it; "" if that is not known."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def is_alive(process: int, started: str) -> bool:
    """Whether a process of this machine is running; a killed one that its parent has not collected yet is not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return state[0] not in "ZX" and state[19] == started
    except (OSError, IndexError):
        if os.name != "posix" or os.path.isdir("/proc/self"):
            return os.name != "posix"  # elsewhere, os.kill(process, 0) would end it
    try:
        os.kill(process, 0)
        return True
    except OSError as error:
        return not isinstance(error, ProcessLookupError)


class Lease:
    """Hold a trial while its training runs: write the lease, and renew it from a thread until the end of the context.

    write: stores a lease, and raises if the trial has ended. renew: does the same from the thread (by default `write`). lost:
    whether that has happened, because another worker took this one for dead. missed: whether the storage could not be reached.
    """

    def __init__(
        self, write: Callable[[dict[str, Any]], None], every: float, renew: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self.owner, self.lost, self.missed = uuid.uuid4().hex, False, False
        self._write, self._rewrite, self._every, self._beat = write, renew or write, every, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="outgrow-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._write(self._facts())
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()

    def _facts(self) -> dict[str, Any]:
        process = os.getpid()
        about = {"place": place(), "process": process, "started": start_of(process)}
        return {"owner": self.owner, **about, "beat": self._beat}

    def _renew(self) -> None:
        from optuna.exceptions import UpdateFinishedTrialError

        while not self._end.wait(self._every):
            self._beat += 1
            try:
                self._rewrite(self._facts())
            except (UpdateFinishedTrialError, KeyError):
                self.lost = True
                return
            except Exception:  # a storage that can't be reached for a moment: the end of the trial reports it if it stays so
                self.missed = True


class Observer:
    """Find stale trials: `stale(trial)` is called again and again with the present state of each running trial.

    Example:
        >>> from types import SimpleNamespace
        >>> now = [0.0]
        >>> observer = Observer(patience=60, clock=lambda: now[0])
        >>> trial = SimpleNamespace(number=3, user_attrs={"lease": {"owner": "a", "place": "elsewhere", "beat": 7}})
        >>> observer.stale(trial)
        False
        >>> now[0] = 61.0
        >>> observer.stale(trial)
        True
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._seen: dict[int, tuple[Any, float]] = {}

    def forget(self) -> None:
        """Begin anew, since the storage was not reached for a while: the leases in it could not be renewed."""
        self._seen.clear()

    def stale(self, trial: Any) -> bool:
        lease = trial.user_attrs.get("lease") or {}
        if lease.get("place") == place() and not is_alive(int(lease["process"]), str(lease["started"])):
            return True
        mark, now = (lease.get("owner"), lease.get("beat")), self._clock()
        if self._seen.get(trial.number, (None, now))[0] != mark or trial.number not in self._seen:
            self._seen[trial.number] = mark, now
        return now - self._seen[trial.number][1] > self._patience
