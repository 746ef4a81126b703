"""The two networks of the no-spike benchmark: the paper's residual network, and a small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.setting.models import ResNetCifar


def resnet() -> ResNetCifar:
    """The paper's ResNetCifar-10(1/4), with weights as torch draws them, which the committed results go by."""
    return ResNetCifar(1 / 4, blocks=2, he=False)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (batch, head, token, feature)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A pre-norm vision transformer on patches of 4 × 4 pixels; the head reads the mean of the tokens."""

    def __init__(self, width: int = 96, heads: int = 4, hidden: int = 192, blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(dim=1))
