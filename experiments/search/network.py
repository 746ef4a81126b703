"""The networks: a small residual network with three stages, and the same network with new weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions with norms on a branch that is added to its input; the sum is not activated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class Parent(nn.Module):
    """A stem, three stages of one block each, with a convolution and a pool between them, and a classifier."""

    def __init__(self, width: int = 16, channels: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stage1 = nn.Sequential(Block(width))
        self.down1 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.stage2 = nn.Sequential(Block(2 * width))
        self.down2 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, bias=False)
        self.stage3 = nn.Sequential(Block(4 * width))
        self.norm, self.classifier = nn.BatchNorm2d(4 * width), nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.down1(self.stage1(self.stem(x))), 2)
        x = F.max_pool2d(self.down2(self.stage2(x)), 2)
        out: Tensor = self.classifier(F.relu(self.norm(self.stage3(x))).mean((2, 3)))
        return out


def start_over(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Draw all weights again, and forget the state of optimizers: the architecture alone is left."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
    for optimizer in optimizers:
        optimizer.state.clear()
