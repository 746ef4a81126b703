"""The comparison of outputs where they are all zero, as after a dead ReLU: rounding passes, a real change does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import VerifyError
from outgrow.verify import outputs

X = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))


def dead(seed: int) -> nn.Sequential:
    """A network whose outputs are all zero on the example."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.ReLU())
    nn.init.constant_(model[2].bias, -10.0)
    assert not model(X).any()
    return model


@pytest.mark.parametrize("seed", range(3))
def test_rounding_in_outputs_that_were_zero_is_no_difference(seed: int) -> None:
    model = dead(seed)
    outgrow.grow(model, X, outgrow.Widen("0", to=6), outgrow.Kernel("0", (9, 5)), outgrow.Deepen("3"))
    assert model(X).abs().max() < 1e-6


@pytest.mark.parametrize("bias", [1e-5, 1.0])
def test_a_change_of_outputs_that_were_zero_is_refused(bias: float) -> None:
    model = dead(0)
    base = outputs.before(model, X)
    nn.init.zeros_(model[2].weight)
    nn.init.constant_(model[2].bias, bias)
    with pytest.raises(VerifyError, match="differs from the old one"):
        outputs.check(model, X, base, preserving=True)
