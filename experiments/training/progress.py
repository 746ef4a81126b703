"""A progress bar on long work."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any


class Progress:
    """A bar over all epochs, with rich where it is installed; else a line now and then."""

    def __init__(self, total: float) -> None:
        self.total, self.done, self.told = total, 0.0, 0.0
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("epochs"),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self.bar: Any = Progress(*columns)
            self.task = self.bar.add_task("", total=round(total))
        except ImportError:
            self.bar = None
        if self.bar is not None and not self.bar.console.is_terminal:
            self.bar = None

    def __enter__(self) -> Progress:
        (self.bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        (self.bar or nullcontext()).__exit__(*what)

    def __call__(self, epochs: float, text: str) -> None:
        self.done += epochs
        if self.bar is not None:
            self.bar.update(self.task, completed=round(self.done), description=text)
        elif time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            print(f"{self.done:,.0f} of {self.total:,.0f} epochs: {text}", flush=True)
