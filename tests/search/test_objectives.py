"""Objectives: what they are given as, what training must return, and what is measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from outgrow.errors import SearchError
from outgrow.search.objectives import DivergedError, Objectives, measure


@pytest.mark.parametrize("given", [{"a": "up"}, [], 3, {}, {3: "min"}, [""]])
def test_wrong_objectives(given: Any) -> None:
    with pytest.raises(SearchError, match="objectives"):
        Objectives.of(given)


def test_the_metrics_of_training() -> None:
    both = Objectives.of({"accuracy": "max", "flops": "min"})
    assert both.metrics_of({"accuracy": torch.tensor(0.5), "loss": math.nan})["accuracy"] == 0.5
    assert both.metrics_of(0.25) == {"accuracy": 0.25}
    assert both.losses([0.25, 8.0]) == (-0.25, 8.0)
    with pytest.raises(DivergedError, match="accuracy is nan"):
        both.metrics_of({"accuracy": math.nan})
    with pytest.raises(SearchError, match="train returned loss, but not 'accuracy'"):
        both.metrics_of({"loss": 1.0})
    with pytest.raises(SearchError, match="train returned None: it has to return a dict"):
        both.metrics_of(None)
    with pytest.raises(SearchError, match="no numbers"):
        both.metrics_of({"accuracy": "high"})


def test_what_is_measured() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5)), torch.randn(2, 3, 8, 8)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert measure("flops", model, x) == counter.get_total_flops()
    assert measure("parameters", model, x) == 3 * 4 * 9 + 4 + 144 * 5 + 5
    model.train()
    assert 0 < measure("latency", model, x) < 1
    assert model.training
