"""The benchmark of families, on a network that takes no time, and its page, which is that of the committed results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from benchmarks import families


def tiny() -> tuple[Any, Any, list[Any]]:
    """A tiny network."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 4), [outgrow.Widen("0", to=32)]


@pytest.mark.exhaustive
def test_a_tiny_family_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MODELS", {"tiny": tiny})
    found = families.measure("tiny")
    assert [member["parameters"] for member in found["members"]] == [58, 226]
    assert found["memory"]["family"] / found["memory"]["largest"] <= families.LIMIT
    assert found["memory"]["largest"] >= 4 * 4 * 226  # values, gradients and two moments
    assert all(member["step"]["n"] == member["pairs"] >= families.PAIRS for member in found["members"])


def test_the_page_is_that_of_the_committed_results() -> None:
    assert families.PAGE.read_text(encoding="utf-8") == families.page(), "`python -m benchmarks.families --table` writes it"
