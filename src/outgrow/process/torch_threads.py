"""The threads that torch starts for one operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let each operator use one thread, also in threads that start inside the context.

    Operators that move memory gain little from more. The threads of an operator wait for each other actively, which takes ten
    times as long where other processes use the same cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
