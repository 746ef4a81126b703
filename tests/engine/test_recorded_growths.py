"""Growths give the values that they gave when they were recorded: same seed, same model."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests.helpers.recorded_growths import CASES, FILE, grown


@cache
def recorded() -> Any:
    return json.loads(FILE.read_text())


def close(now: Any, then: Any) -> bool:
    """Whether two values are equal, floats up to rounding."""
    if isinstance(then, dict):
        return list(now) == list(then) and all(close(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return len(now) == len(then) and all(map(close, now, then))
    return now == pytest.approx(then, rel=1e-8, abs=1e-8) if type(then) is float else now == then


@pytest.mark.parametrize("name", CASES)
def test_a_growth_gives_what_was_recorded(name: str) -> None:
    now, then = json.loads(json.dumps(grown(name))), recorded()[name]
    assert [key for key in then if not close(now[key], then[key])] == []
