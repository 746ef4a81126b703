"""The two networks of the no-spike benchmark, as anyone would write them: nothing here knows of outgrow.

ResNetCifar-10(r) is the paper's (appendix, table of architectures), r times 64 and 128 channels. The strides are those that its
output sizes of 16, 8 and 4 need: two in conv1, in the pool and in the first block of the second stage. Its weights are as torch
draws them, which the results go by; the one in experiments/models.py draws them by He's rule.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.skip(x))


class ResNetCifar(nn.Module):
    """Two stages of `blocks` basic blocks: 2 + 4 · blocks layers."""

    def __init__(self, r: float = 0.25, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        first, second = int(64 * r), int(128 * r)
        self.conv1 = nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(*(BasicBlock(first, first) for _ in range(blocks)))
        self.layer2 = nn.Sequential(BasicBlock(first, second, 2), *(BasicBlock(second, second) for _ in range(blocks - 1)))
        self.fc = nn.Linear(second, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer2(self.layer1(x)).mean(dim=(2, 3)))


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
