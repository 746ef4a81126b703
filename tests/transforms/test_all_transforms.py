"""What is no transform, and what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outgrow


def test_lists_and_schedules_are_no_transforms() -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(2, 4)
    with pytest.raises(outgrow.GrowthError, match="a list of transforms is no transform: write a star before it"):
        outgrow.grow(model, x, outgrow.recipes.reuse(factor=2))  # type: ignore[arg-type]
    with pytest.raises(outgrow.GrowthError, match=r"a schedule is no transform: pass it to outgrow\.Run"):
        outgrow.grow(model, x, outgrow.Schedule([outgrow.At(step=1, grow=[outgrow.Widen("0", by=2)])]))  # type: ignore[arg-type]
