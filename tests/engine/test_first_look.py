"""Real models grow and compute the same."""

from __future__ import annotations

import torch
from torch import nn

import outgrow


def test_a_small_network_grows_by_pairs_and_computes_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    before = model(x)
    growth = outgrow.widen(model, x, "0", to=12, method="r2r")
    assert model[0].weight.shape == (12, 4)
    assert growth.parameters == (58, 86)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
