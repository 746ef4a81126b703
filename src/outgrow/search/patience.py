"""Wait while a storage can't be reached: a server that is restarted, or a dropped connection, ends no worker.

A call whose connection breaks may have been carried out or not, and is repeated. That does no harm: attributes are set again to
the same values, a second attempt at a trial is dropped (`records`), and a trial ends only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from outgrow.search.storage_errors import UnreachableError, passes, said
from outgrow.text.terminal import line

MOST = 300.0  # seconds
FIRST, SLOWEST = 0.2, 5.0  # seconds between two attempts


class Patient:
    """A storage of Optuna whose calls are repeated for some minutes while it can't be reached; then UnreachableError.

    outages: how often that has happened. impatient: the storage itself, which does not wait.
    """

    def __init__(self, storage: Any) -> None:
        self.impatient, self.outages = storage, 0

    def __getattr__(self, name: str) -> Any:
        if name == "impatient" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        found = getattr(self.impatient, name)
        return partial(self._call, found) if callable(found) and not name.startswith("_") else found

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return call(*args, **options)
        except Exception as error:
            if not passes(error):
                raise
        self.outages += 1
        begun, pause, told = time.monotonic(), FIRST, False
        while True:
            time.sleep(pause)
            try:
                found = call(*args, **options)
            except Exception as error:
                if not passes(error):
                    raise
                if time.monotonic() - begun > MOST:
                    raise UnreachableError(
                        f"the storage can't be reached for {MOST / 60:.0f} minutes ({said(error)}): the study is as it was; "
                        "start the same command again when the storage is back"
                    ) from error
                if not told:
                    line(f"the storage can't be reached ({said(error)}): trying again for {MOST / 60:.0f} minutes")
                told, pause = True, min(2 * pause, SLOWEST)
            else:
                if told:
                    line(f"the storage is back after {time.monotonic() - begun:.0f} seconds")
                return found


def release(storage: Any) -> None:
    """Close the connections of a storage to its database; it opens new ones if it is used again."""
    found = impatient(storage)
    engine = getattr(getattr(found, "_backend", found), "engine", None)
    if engine is not None:
        engine.dispose()


def impatient(storage: Any) -> Any:
    """A storage that does not wait."""
    return storage.impatient if isinstance(storage, Patient) else storage
