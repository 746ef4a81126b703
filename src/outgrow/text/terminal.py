"""A terminal in which progress bars and lines do not get into each other. rich and tqdm are used if they are there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TypeVar

Item = TypeVar("Item")


def line(text: str) -> None:
    """Print a line on the terminal, above progress bars if there are any.

    While a bar of rich's is alive, sys.stderr is one that prints above it; tqdm has to be asked.
    """
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and getattr(tqdm, "_instances", None):
        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)


def track(iterable: Iterable[Item], describe: str | Callable[[], str] = "", total: int | None = None) -> Iterator[Item]:
    """Go through an iterable with a progress bar: by rich or tqdm, or none if there is neither, or no terminal.

    describe: what the bar says, or a function that tells it anew for each item.

    Example:
        >>> list(track([1, 2, 3], "epochs"))
        [1, 2, 3]
    """
    told = describe if callable(describe) else lambda: str(describe)
    bar = _bar(total if total is not None else getattr(iterable, "__len__", lambda: None)(), told)
    try:
        for item in iterable:
            yield item
            bar.advance()
    finally:
        bar.close()


class _Silent:
    """No bar."""

    def advance(self) -> None: ...

    def close(self) -> None: ...


class _Rich(_Silent):
    def __init__(self, total: int | None, told: Callable[[], str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress, self.told = Progress(*columns, console=Console(stderr=True)), told
        self.progress.start()
        self.task = self.progress.add_task(told(), total=total)

    def advance(self) -> None:
        self.progress.update(self.task, advance=1, description=self.told())

    def close(self) -> None:
        self.progress.stop()


class _Tqdm(_Silent):
    def __init__(self, total: int | None, told: Callable[[], str]) -> None:
        self.bar, self.told = import_module("tqdm").tqdm(total=total, desc=told()), told

    def advance(self) -> None:
        self.bar.set_description(self.told(), refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _bar(total: int | None, told: Callable[[], str]) -> _Silent:
    if sys.stderr.isatty():
        for kind in (_Rich, _Tqdm):
            try:
                return kind(total, told)
            except ImportError:
                continue
    return _Silent()
