"""Stub replaced below."""

from __future__ import annotations


def grow_optimizers(optimizers, model, plan, olds, journal) -> None:  # type: ignore[no-untyped-def]
    pass


def watch_for_stale(model, plan, optimizers) -> None:  # type: ignore[no-untyped-def]
    pass
