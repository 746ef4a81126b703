"""A journal of changes, by which everything can be restored bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outgrow.process.signals import DeferredSignals


class Journal:
    """Functions that undo changes. As a context: all changes are undone if anything fails inside, and kept otherwise.

    outer: another journal, which can then still undo the changes that are kept.
    """

    def __init__(self, outer: Journal | None = None) -> None:
        self._undo: list[Callable[[], None]] = []
        self._outer = outer

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.undo()
        self.close()

    def note(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        with DeferredSignals() as interrupts:
            interrupts.begin()
            while self._undo:
                self._undo.pop()()

    def close(self) -> None:
        """Keep the changes, and release the old tensors, unless there is an outer journal."""
        if self._outer is not None:
            self._outer._undo += self._undo
        self._undo.clear()
