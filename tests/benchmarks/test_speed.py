"""The benchmark of costs, on a network that takes no time: it still fits the functions that it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import speed


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured through /proc")
def test_a_tiny_growth_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(name: str) -> tuple[nn.Module, Any]:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(2, 4)

    monkeypatch.setattr(speed, "build", tiny)
    monkeypatch.setattr(speed, "map_from", lambda size: None)  # it would set the allocator of this process
    found = speed.measure_apply("mlp")
    assert found["parameters"] == [58, 86]
    assert found["volumes"] == 1
    assert found["apply_s"]["n"] == speed.REPETITIONS
