"""For all tests, and for examples in docstrings: what a test registers is forgotten after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

LAST_FILE: list[object] = [None]


def pytest_sessionstart() -> None:
    """The imports of all test files create millions of objects and hardly any garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    _exclude_imported_objects()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests import further packages; what they leave is excluded before the next file."""
    if item.path != LAST_FILE[0]:
        LAST_FILE[0] = item.path
        _exclude_imported_objects()


def pytest_sessionfinish() -> None:
    gc.enable()
    gc.unfreeze()


def _exclude_imported_objects() -> None:
    """Exclude all objects of imported packages from searches.

    A growth searches all objects of the process for optimizers that it was not given (`states_with`). The packages that the
    tests import have millions of objects; a search through them takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


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
