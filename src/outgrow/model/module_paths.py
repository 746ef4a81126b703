"""Dotted paths of modules and tensors: join them, and make them relative."""

from __future__ import annotations


def joined_path(place: str, name: str) -> str:
    return f"{place}.{name}" if place and name else place or name


def inside(place: str, name: str) -> str | None:
    """A name relative to a place; None if it is outside."""
    if not place:
        return name
    return name[len(place) + 1 :] if name.startswith(f"{place}.") else None
