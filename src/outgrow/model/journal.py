"""A journal of changes, from which everything can be put back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outgrow.process.signals import Deferral


class Journal:
    """What was done, and how to undo it. As a context: all is undone if anything fails within, and let go of otherwise."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if kind is not None:
            self.undo()
        self.close()

    def note(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        with Deferral() as interrupts:
            interrupts.begin()
            while self._undo:
                self._undo.pop()()

    def close(self) -> None:
        """Let go of the old tensors."""
        self._undo.clear()
