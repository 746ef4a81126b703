"""For all tests, and for examples in docstrings: what a test registers is forgotten after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


def pytest_collection_finish() -> None:
    """Exclude all objects of imported packages from searches.

    A growth searches all objects of the process for optimizers that it was not given (`states_with`). The packages that the
    tests import have millions of objects; a search through them takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _forget_registrations() -> Iterator[None]:
    from outgrow.methods.base import REGISTERED
    from outgrow.model.reference_operators import REFERENCES
    from outgrow.transforms.all_transforms import REGISTERED as TRANSFORMS

    tables: tuple[dict[str, object], ...] = (REGISTERED, REFERENCES, TRANSFORMS)  # type: ignore[assignment]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)
