"""Dotted paths of modules and tensors: join them, and cut them off."""

from __future__ import annotations


def joined_path(place: str, name: str) -> str:
    return f"{place}.{name}" if place and name else place or name


def inside(place: str, name: str) -> str | None:
    """A name as it is within a place; None if it is elsewhere."""
    if not place:
        return name
    return name[len(place) + 1 :] if name.startswith(f"{place}.") else None
