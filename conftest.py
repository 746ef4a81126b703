"""For all tests, and for examples in docstrings: what a test registers is forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


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
