"""The report of a growth: what it says of errors and of volumes that stayed as they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import outgrow


def chain(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def test_counts_have_their_nouns() -> None:
    growth = outgrow.widen(chain(2), torch.randn(3, 4), "*", factor=2)  # neither inputs nor outputs grow
    assert "left unchanged: 2 volumes\n" in str(growth)
    assert "left unchanged: 1 volume\n" in str(replace(growth, skipped=growth.skipped[:1]))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2.0**-18), (torch.float64, 2.0**-47)])
def test_the_error_is_relative_to_the_largest_output_and_its_limit_a_constant(dtype: torch.dtype, limit: float) -> None:
    model, x = chain(2).to(dtype), torch.randn(3, 4, dtype=dtype)
    with torch.no_grad():
        model[2].weight.mul_(1000.0)
        model[2].bias.mul_(1000.0)
    growth = outgrow.widen(model, x, "0", by=4)
    assert growth.tolerance == limit  # 32 units in the last place
    assert growth.max_error <= limit
    assert f"error: {growth.max_error:.1e} of the largest output (limit for rounding: {limit:.1e})" in str(growth)
    before = model(x).detach()
    growth = outgrow.widen(model, x, "0", by=4, method="random")
    assert growth.max_error == pytest.approx(float((model(x).detach() - before).abs().max() / before.abs().max()), rel=0.2)
    assert "of the largest output: this method does NOT preserve the function" in str(growth)
