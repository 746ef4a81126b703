"""Shortcuts of residual networks that pad channels with zeros (option A), by amounts that the code computes as it runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, randomised
from tests.helpers.judging import assert_same_function


class Block(nn.Module):
    def __init__(self, channels: int, planes: int, how: str) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(channels, planes, 3, 2, 1), nn.Conv2d(planes, planes, 3, 1, 1)
        self.norm, self.planes, self.how = nn.BatchNorm2d(planes), planes, how

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.two(torch.relu(self.one(x))))
        half = {"attribute": self.planes, "shape": y.shape[1]}.get(self.how, 0) - x.shape[1]
        sides = (half // 2, half // 2) if half > 0 else (0, y.shape[1] - x.shape[1])
        return torch.relu(y + nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *sides)))


def build(how: str) -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), Block(4, 8, how), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)]
    return randomised(nn.Sequential(*layers))


IMAGE, FRESH = (torch.randn(n, 3, 8, 8, dtype=DTYPE, generator=torch.Generator().manual_seed(n)) for n in (2, 3))


@pytest.mark.parametrize("how", ["attribute", "shape"])
@pytest.mark.parametrize("factor", [1.5, 2])
def test_symmetric_padding_is_left_out_and_the_rest_grows(how: str, factor: float) -> None:
    model = build(how)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, IMAGE, "*", factor=factor)
    assert {change.volume for change in growth.plan.changes} == {"0", "1.one"}
    assert "would keep units at their positions" in {skip.volume: skip.reason for skip in growth.skipped}["1.two"]
    assert_same_function(old, model, [IMAGE, FRESH])


@pytest.mark.parametrize("how", ["attribute", "shape"])
def test_symmetric_padding_that_is_named_is_refused_with_the_reason(how: str) -> None:
    with pytest.raises(outgrow.GrowthError, match="would keep units at their positions"):
        outgrow.widen(build(how), IMAGE, "1.two", by=2)


def test_padding_at_the_end_grows_along() -> None:
    model = build("end")
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, IMAGE, "*", factor=2)
    assert {change.volume for change in growth.plan.changes} == {"0", "1.one", "1.two"}
    assert_same_function(old, model, [IMAGE, FRESH])
