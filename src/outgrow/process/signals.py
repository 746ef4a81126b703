"""Defer signals while a few lines must run without interruption: Ctrl-C and other handlers run after them.

Python runs signal handlers between any two instructions of the main thread, so a KeyboardInterrupt can arrive between the
growth of a model and the record of that growth. Only signals with a Python handler are deferred; `kill -9`, or a signal without
a handler, ends the process as usual.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any


class DeferredSignals:
    """Defer signals from `begin()` to the end of the context; then call their own handlers, in order.

    In threads other than the main thread it does nothing: handlers never run there.

    Example:
        >>> before = signal.signal(signal.SIGINT, lambda number, frame: print("interrupted"))
        >>> with DeferredSignals() as deferral:
        ...     deferral.begin()
        ...     signal.raise_signal(signal.SIGINT)
        ...     print("done")
        done
        interrupted
        >>> _ = signal.signal(signal.SIGINT, before)
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._waiting: list[int] = []

    def __enter__(self) -> DeferredSignals:
        return self

    def begin(self) -> None:
        """Defer signals from here on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and number not in self._handlers:
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def __exit__(self, *raised: Any) -> None:
        try:
            self._restore(list(self._handlers.items()))
        finally:
            self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append(number)

    def _restore(self, handlers: list[tuple[int, Any]]) -> None:
        """Restore all handlers, even if a signal arrives after the first of them."""
        if handlers:
            try:
                signal.signal(*handlers[0])
            finally:
                self._restore(handlers[1:])

    def _deliver(self) -> None:
        """Call the handlers here: one that runs later might run in a weakref callback, where Python drops what it raises."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self._deliver()
