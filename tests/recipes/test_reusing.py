"""`outgrow.recipes.reuse`: its transforms grow a model, and its settings are those of the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import GrowthError
from outgrow.recipes import reusing

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "protocol"


def accuracy(arm: str) -> float:
    """With settings of its own, where it has a run of that kind."""
    path = next(path for name in (f"OWN-{arm}", arm) if (path := RESULTS / f"{name}.json").exists())
    curves = json.loads(path.read_text())["curves"]
    return 100 * mean(stages[-1]["accuracy"][-1] for stages in curves.values())


def test_the_growth_keeps_the_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    x = torch.randn(5, 4)
    before = model(x)
    outgrow.grow(model, x, *outgrow.recipes.reuse(factor=2))
    assert model[0].out_features == 16
    torch.testing.assert_close(model(x), before)


def test_depth_and_width_together() -> None:
    assert outgrow.recipes.reuse(factor=1.5, layers=4, stack="h") == [
        outgrow.Widen("*", factor=1.5, method="netmorph"),
        outgrow.Deepen(layers=4, method="r2r", stack="h"),
    ]


def test_without_a_size() -> None:
    with pytest.raises(GrowthError, match="say how large"):
        outgrow.recipes.reuse()


def test_what_is_said_of_the_methods_is_in_the_results() -> None:
    """The comments beside the settings in `outgrow/recipes/reusing.py`."""
    budgets = 1, 2, 4, 8, 16
    ahead = {budget: accuracy(f"RE-widen-netmorph@{budget}") - accuracy(f"RE-widen-r2r@{budget}") for budget in budgets}
    assert reusing.WIDEN_METHOD == "netmorph"
    assert all(0.55 <= ahead[budget] < 0.85 for budget in (4, 8, 16))
    assert all(abs(ahead[budget]) <= 0.2 for budget in (1, 2))
    others = ("copy", "fade", "r2r-paper", "random")
    for budget in budgets:
        behind = max(accuracy(f"RE-deepen-{other}@{budget}") for other in others) - accuracy(f"RE-deepen-r2r@{budget}")
        assert behind < (0.25 if budget == 8 else 0)
