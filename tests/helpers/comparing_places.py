"""Small models with places to compare methods at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.random_weights import randomise

WRITERS = "netmorph(zero='writers')"
METHODS = {
    "r2r": outgrow.R2R(),
    "net2net": outgrow.Net2Net(),
    "netmorph": outgrow.NetMorph(),
    WRITERS: outgrow.NetMorph(zero="writers"),
}


class Over(nn.Module):
    """A user-defined activation."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp(between: nn.Module, hidden: int = 6) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, hidden), between, nn.Linear(hidden, 2))
    randomise(model, torch.Generator().manual_seed(1))
    return model


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def conv_net() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    randomise(model, torch.Generator().manual_seed(1))
    return model


class Stage(nn.Module):
    """A stem and a residual block with batch norms; its stream is written twice and read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.one, self.norm1 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.two, self.norm2 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        inner = torch.relu(self.norm1(self.one(x)))
        x = torch.relu(x + self.norm2(self.two(inner)))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 10), nn.Linear(10, width), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.proj(torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v)
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm2(x)))))


def transformer(drop: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), Block(4, drop), Block(4, drop), nn.LayerNorm(4), nn.Linear(4, 2))
    randomise(model, torch.Generator().manual_seed(1))
    return model


def stage() -> Stage:
    model = Stage()
    randomise(model, torch.Generator().manual_seed(1))
    return model
