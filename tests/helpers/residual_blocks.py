"""Residual blocks as people write them, and networks of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bare(nn.Module):
    """relu(x + f(x)), the skip in the code; a projection where sizes change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.projection = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.projection is None else self.projection(x)
        return F.relu(skip + self.branch(x))


class Module(Bare):
    """The skip is a module."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.skip = nn.Identity() if self.projection is None else self.projection

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.skip(x))


class Torchvision(Bare):
    """As torchvision writes it."""

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.branch(x)
        if self.projection is not None:
            identity = self.projection(x)
        out += identity
        return F.relu(out)


class PreActivated(Bare):
    """The stream itself has no activation: x + f(bn(x)), scaled."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.norm = nn.BatchNorm2d(inputs)

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.projection is None else self.projection(x)
        return torch.add(0.5 * skip, self.branch(F.gelu(self.norm(x))))


class Gated(Bare):
    """The branch ends in a squeeze-and-excitation gate, which reads and writes its own volume."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.squeeze, self.excite = nn.Conv2d(outputs, 4, 1), nn.Conv2d(4, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        y = y * torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        skip = x if self.projection is None else self.projection(x)
        return F.relu(y.add(skip))


class Padded(Bare):
    """Down-sampling by strides and channels of zeros, as the paper on residual networks does on CIFAR."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.projection, self.extra = None, (outputs - inputs) // 2
        self.conv1.stride = (2, 2) if self.extra else (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra)) if self.extra else x
        return F.relu(self.branch(x) + skip)


class Moody(Bare):
    """Code that branches on values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mood", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.mood.abs() >= 0 else x


class MoodyModule(Module):
    """The same, but the skip is a module (and so is something else)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mood", torch.ones(()))
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.branch(self.drop(x))) if self.mood.abs() >= 0 else x


class Training(Bare):
    """Code that does one thing in training and another in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1.0 * self.branch(x) if self.training else x + self.branch(x)


class Counting(Bare):
    """Code that changes an attribute, which would be lost."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.branch(x)


class Lucky(Bare):
    """Code that draws a random number."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * torch.rand(())


class Overwriting(Bare):
    """`x += f(x)` changes what the caller holds, and the caller reads it again."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.view_as(x)
        x += self.branch(x)
        return x + kept


class Adder(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Net(nn.Module):
    """A stem, three blocks on one stream, two on another, a head."""

    def __init__(self, kind: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one = nn.Sequential(kind(8, 8), kind(8, 8), kind(8, 8))
        self.two = nn.Sequential(kind(8, 12), kind(12, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(F.relu(self.norm(self.stem(x))))).mean((2, 3)))


class Features(nn.Module):
    """A residual stream of features over tokens, summed in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.up2, self.down2, self.head = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.down(F.relu(self.up(x)))
        x = x - self.down2(F.relu(self.up2(x)))
        return self.head(x)
