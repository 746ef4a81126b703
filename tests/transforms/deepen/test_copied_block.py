"""Which block `Deepen` copies: the named one, unless kinds of blocks alternate or it differs from its siblings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outgrow


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1) >= self.rate) / (1 - self.rate)


class Block(nn.Module):
    """A residual block; with a rate of zero it holds nn.Identity, as in timm."""

    def __init__(self, rate: float, shift: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.shift = nn.Linear(4, 6), nn.Linear(6, 4), shift
        self.drop_path = DropPath(rate) if rate else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.down(torch.relu(self.up(x.roll(self.shift, 0)))))


@pytest.mark.parametrize("depth", [2, 4])
def test_the_named_block_is_copied_whatever_its_drop_path(depth: int) -> None:
    for index in range(depth):
        model = nn.Sequential(*(Block(0.1 * number) for number in range(depth)))
        rows = model[index].up.weight.detach().clone()
        outgrow.deepen(model, torch.randn(5, 4), str(index))
        assert type(model[index + 1].drop_path) is type(model[index].drop_path)
        copied = [bool((model[index + 1].up.weight == row).all(1).any()) for row in rows]
        assert any(copied)  # pairs replace some rows, the rest are those of the named block


def test_alternating_kinds_still_alternate() -> None:
    model = nn.Sequential(*(Block(0.1 * number, number % 2) for number in range(4)))
    outgrow.deepen(model, torch.randn(5, 4), "1")
    assert [block.shift for block in model][:3] == [0, 1, 0]
