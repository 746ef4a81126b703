"""ResNet-20 for images of 32 × 32 (He et al., 2016), at any width: three stages of three blocks, 16, 32 and 64 channels.

Skips that change the size are a 1 × 1 convolution and a norm (option B): zeros that are padded to channels (option A) would fix
how channels of two stages belong together, and widths could not grow. 0.27 M parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.setting.models import stage


class ResNet20(nn.Module):
    """width: channels of the first stage; the others have two and four times as many."""

    def __init__(self, width: int = 16, channels: int = 3, classes: int = 10, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, blocks, 1, residual=True)
        self.layer2 = stage(width, 2 * width, blocks, 2, residual=True)
        self.layer3 = stage(2 * width, 4 * width, blocks, 2, residual=True)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3)))
        return out


def build(width: int, channels: int, blocks: int, seed: int) -> ResNet20:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResNet20(width, channels, blocks=blocks)
