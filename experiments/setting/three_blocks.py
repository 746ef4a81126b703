"""The network of appendix B, as its author's code builds it (`Cifar_Resnet_v1` of `src/batch_cifar_tests.py`).

Three residual blocks with a max pool behind each, and two linear layers. A block is three 3 × 3 convolutions, each with a batch
norm and a ReLU, and a 1 × 1 convolution; its input is added to the first channels of its output. The last two convolutions
begin as halves that cancel: a block is an identity at first. The small networks are those with half the filters inside
blocks, or without the third block, in whose place channels of zeros are appended.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS = (3, 16, 32, 64)
HIDDEN, CLASSES = 128, 10


class PaddedBlock(nn.Module):
    """x + branch(x), where x is padded with channels of zeros."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, inner, 3, padding=1), nn.BatchNorm2d(inner)
        self.reduce = nn.Conv2d(inner, outputs, 1)
        self.more = outputs - inputs
        close(self)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = F.relu(self.bn3(self.conv3(y)))
        return self.reduce(y) + F.pad(x, (0, 0, 0, 0, 0, self.more))


@torch.no_grad()
def close(block: PaddedBlock) -> None:
    """Let the last two convolutions cancel: W = [U; U], V = [A, −A], biases zero; U and A by He's rule, √(2 / inputs)."""
    half = block.conv3.out_channels // 2
    for layer in (block.conv3, block.reduce):
        nn.init.normal_(layer.weight, std=(2 / layer.in_channels) ** 0.5)
        nn.init.zeros_(layer.bias)
    block.conv3.weight[half : 2 * half] = block.conv3.weight[:half]
    block.reduce.weight[:, half : 2 * half] = -block.reduce.weight[:, :half]


class Padding(nn.Module):
    """Channels of zeros in the place of a block that is not there yet."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, 0, CHANNELS[3] - CHANNELS[2]))


class ThreeBlocks(nn.Module):
    """wide: how many times as many filters inside blocks as outside; blocks: two or three."""

    def __init__(self, wide: int = 2, blocks: int = 3) -> None:
        super().__init__()
        self.wide = wide
        one, two, three = CHANNELS[1:]
        self.block1, self.block2 = PaddedBlock(CHANNELS[0], wide * one, one), PaddedBlock(one, wide * two, two)
        self.block3: nn.Module = PaddedBlock(two, wide * three, three) if blocks == 3 else Padding()
        self.pool = nn.MaxPool2d(2)
        self.fc1, self.fc2 = nn.Linear(4 * 4 * three, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.block1, self.block2, self.block3):
            x = self.pool(block(x))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))

    def add_block(self, seed: int) -> None:
        """The third block, an identity as yet, in the place of the zeros: R2DeeperR as appendix B's code does it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.block3 = PaddedBlock(CHANNELS[2], self.wide * CHANNELS[3], CHANNELS[3])
