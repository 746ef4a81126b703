"""A chain of small residual blocks and an input for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.judging import shake

X = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, width: int = 6, activation: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 8), nn.Linear(8, width)
        self.activation, self.after = activation or nn.GELU(), after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.b(self.activation(self.a(x))))


def chain(*blocks: nn.Module) -> nn.Module:
    return shake(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Sequential(*blocks), nn.Linear(6, 3)).double())
