"""Postpone Python's garbage collection while a growth or an analysis makes many small objects.

Every so many new objects, Python looks for cycles among all objects that there are. With a few large libraries imported, these
are half a million, and the search takes longer than what it interrupts. What is made meanwhile is freed without
such a search, by reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """No search for cycles inside; afterwards as it was."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
