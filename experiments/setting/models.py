"""The paper's networks, as anyone would write them: nothing here knows of outgrow.

ResNetCifar-10(r) and -18(r) have r times 64 and 128 channels (rounded down) in two stages of two or four blocks. The paper's
table asks for stride two in the first block *and* a pool before it; its output sizes (16, 8, 4) need stride one there, as is
built here. A block that changes the size has a 1 × 1 convolution and a norm on its skip. Without residual connections a block
is its two layers alone.

SmallConv, which the paper calls three-layer, has one convolution and two linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.setting.three_blocks import ThreeBlocks


class Block(nn.Module):
    """Two convolutions and a skip."""

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


class Layer(nn.Sequential):
    """A convolution, a batch norm and a ReLU: half a block without a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


class ResNetCifar(nn.Module):
    """Two stages of blocks; `blocks=2` is ResNetCifar-10, `blocks=4` ResNetCifar-18. he: draw weights by He's rule."""

    def __init__(self, r: float, blocks: int = 4, residual: bool = True, classes: int = 10, he: bool = True) -> None:
        super().__init__()
        first, second = int(64 * r), int(128 * r)
        self.conv1 = nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(first, first, blocks, 1, residual)
        self.layer2 = stage(first, second, blocks, 2, residual)
        self.fc = nn.Linear(second, classes)
        for module in self.modules() if he else ():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer2(self.layer1(x)).mean(dim=(2, 3)))


def stage(inputs: int, outputs: int, blocks: int, stride: int, residual: bool) -> nn.Sequential:
    if residual:
        return nn.Sequential(Block(inputs, outputs, stride), *(Block(outputs, outputs) for _ in range(blocks - 1)))
    return nn.Sequential(Layer(inputs, outputs, stride), *(Layer(outputs, outputs) for _ in range(2 * blocks - 1)))


class SmallConv(nn.Module):
    """For looking at its filters."""

    def __init__(self, filters: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, filters, 7, padding=3)
        self.pool = nn.MaxPool2d(2, stride=2)
        self.fc1 = nn.Linear(filters * 16 * 16, 150)
        self.fc2 = nn.Linear(150, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class DigitsNet(nn.Module):
    """For the demo: a residual network on images of 8 × 8 pixels, 64 r channels wide."""

    def __init__(self, r: float, blocks: int, classes: int = 10) -> None:
        super().__init__()
        width = int(64 * r)
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = stage(width, width, blocks, 1, residual=True)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer1(x).mean(dim=(2, 3)))


@dataclass(frozen=True)
class Net:
    """Which network: `kind` is "resnet", "small", "digits" or "three" (appendix B's, r times as many filters in blocks)."""

    kind: str = "resnet"
    r: float = 1 / 8
    blocks: int = 4
    residual: bool = True

    def build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.kind == "digits":
                return DigitsNet(self.r, self.blocks)
            if self.kind == "three":
                return ThreeBlocks(int(self.r), self.blocks)
            return SmallConv() if self.kind == "small" else ResNetCifar(self.r, self.blocks, self.residual)

    def __str__(self) -> str:
        if self.kind == "small":
            return "SmallConv"
        if self.kind == "three":
            return f"{self.blocks} padded blocks, {int(16 * self.r)} filters in the first"
        if self.kind == "digits":
            return f"{int(64 * self.r)} channels, {self.blocks} blocks"
        return f"ResNetCifar-{2 + 4 * self.blocks}({self.r:.4g})" + ("" if self.residual else " without residual connections")
