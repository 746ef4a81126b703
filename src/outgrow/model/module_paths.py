"""Dotted paths of modules and tensors: join them, and make them relative."""

from __future__ import annotations


def joined_path(*parts: str) -> str:
    """Parts with dots between them; empty ones, such as the path of the model itself, are left out.

    Example:
        >>> joined_path("", "layers.0", "weight")
        'layers.0.weight'
    """
    return ".".join(filter(None, parts))


def inside(place: str, name: str) -> str | None:
    """A name relative to a place; None if it is outside."""
    if not place:
        return name
    return name[len(place) + 1 :] if name.startswith(f"{place}.") else None
