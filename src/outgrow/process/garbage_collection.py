"""Postpone Python's garbage collection while a growth or an analysis creates many small objects.

After a certain number of allocations, Python searches all objects for reference cycles. With a few large libraries imported,
these are half a million objects, and the search takes longer than the work that it interrupts. Objects created in the meantime
are freed by their reference counts, without a search.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable the search for reference cycles inside the context, and restore the previous setting afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_memory() -> None:
    """Collect garbage, and return free memory to the system, where the C library (glibc) can do that."""
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
