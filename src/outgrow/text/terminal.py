"""Print lines and progress bars to the terminal without mixing them up. rich and tqdm are used if they are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TypeVar

Item = TypeVar("Item")


def line(text: str) -> None:
    """Print a line on the terminal, above progress bars if there are any.

    While a bar of rich is active, rich redirects sys.stderr to print above it; tqdm needs its own `write`.
    """
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is not None and getattr(tqdm, "_instances", None):
        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr)


def track(iterable: Iterable[Item], describe: str | Callable[[], str] = "", total: int | None = None) -> Iterator[Item]:
    """Iterate with a progress bar: of rich or tqdm, or none if neither is installed or there is no terminal.

    describe: the text of the bar, or a function that returns it for each item.

    Example:
        >>> list(track([1, 2, 3], "epochs"))
        [1, 2, 3]
    """
    text = describe if callable(describe) else lambda: str(describe)
    bar = _bar(total if total is not None else getattr(iterable, "__len__", lambda: None)(), text)
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
    def __init__(self, total: int | None, text: Callable[[], str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress, self.text = Progress(*columns, console=Console(stderr=True)), text
        self.progress.start()
        self.task = self.progress.add_task(text(), total=total)

    def advance(self) -> None:
        self.progress.update(self.task, advance=1, description=self.text())

    def close(self) -> None:
        self.progress.stop()


class _Tqdm(_Silent):
    def __init__(self, total: int | None, text: Callable[[], str]) -> None:
        self.bar, self.text = import_module("tqdm").tqdm(total=total, desc=text()), text

    def advance(self) -> None:
        self.bar.set_description(self.text(), refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _bar(total: int | None, text: Callable[[], str]) -> _Silent:
    if sys.stderr.isatty():
        for kind in (_Rich, _Tqdm):
            try:
                return kind(total, text)
            except ImportError:
                continue
    return _Silent()
