"""Counts with their nouns: "1 volume", "2 volumes"."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural unless it is one thing.

    Example:
        >>> counted(1, "volume"), counted(2, "volume"), counted(0, "volume")
        ('1 volume', '2 volumes', '0 volumes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
