"""Blocks as people stack them, and the containers that hold them: what a network is deepened by.

Like `blocks`, image blocks map (batch, width, h, w) to the same kind, sequence blocks (batch, tokens, width), and each has
its `out` width. Builders take (width, network, options), as those of `networks` do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import layer_blocks as b

AFTER = {"nothing": nn.Identity, "relu": nn.ReLU, "gelu": nn.GELU, "relu6": nn.ReLU6, "tanh": nn.Tanh}


class Sum(nn.Module):
    """after(x + f(x)): ResNet's blocks and similar ones."""

    def __init__(self, width: int, f: nn.Module, after: str = "nothing") -> None:
        super().__init__()
        self.f, self.after, self.out = f, AFTER[after](), width

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.f(x))


class Basic(nn.Module):
    """The block as in ResNet's code, with or without batch norms; one activation module is used twice."""

    def __init__(self, width: int, hidden: int, norm: bool, bias: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, hidden, 3, padding=1, bias=bias), nn.Conv2d(hidden, width, 3, padding=1)
        self.bn1, self.bn2 = (nn.BatchNorm2d(n) if norm else nn.Identity() for n in (hidden, width))
        self.relu, self.out = nn.ReLU(inplace=True), width

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ConvNeXt(nn.Module):
    """Depthwise convolution, layer norm, inverted linear bottleneck, LayerScale in the block's own code."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma, self.out = nn.Parameter(torch.ones(width)) if scaled else None, width

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        y = y if self.gamma is None else self.gamma * y
        return x + y.permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """A transformer block, with norms before its branches or after the sums."""

    def __init__(self, width: int, attend: nn.Module, mlp: nn.Module, before: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attend, self.mlp = nn.LayerNorm(width), nn.LayerNorm(width), attend, mlp
        self.before, self.out = before, width

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attend(x))
        return self.norm2(x + self.mlp(x))


class Shifted(nn.Module):
    """A block with a second input tensor."""

    def __init__(self, width: int, f: nn.Module) -> None:
        super().__init__()
        self.f, self.out = f, width

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.f(x + shift)


class Weighted(nn.Module):
    """α·x + f(x) with a constant or a parameter on the skip: never the identity."""

    def __init__(self, width: int, f: nn.Module, learnt: bool) -> None:
        super().__init__()
        self.f, self.alpha, self.out = f, nn.Parameter(torch.ones(1)) if learnt else 0.5, width

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.f(x)


class Skewed(nn.Module):
    """x + f(x) with an operator on the skip; only some are the identity if f is zero."""

    def __init__(self, width: int, f: nn.Module, how: str) -> None:
        super().__init__()
        self.f, self.how, self.out = f, how, width

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        if self.how == "subtracted":
            return x - y
        if self.how == "negated":
            return torch.rsub(x, y)
        if self.how == "doubled":
            return torch.add(y, x, alpha=2)
        if self.how == "averaged":
            return F.avg_pool1d(x.flatten(2), 3, 1, 1).view_as(x) + y
        if self.how == "flipped":
            return x.flip(-1) + y
        if self.how == "there and back":
            return (
                (x.transpose(1, -1).reshape(x.shape[0], -1) + y.transpose(1, -1).flatten(1))
                .unflatten(1, x.transpose(1, -1).shape[1:])
                .transpose(1, -1)
            )
        if self.how == "halves":
            one, other = x.chunk(2, -1)
            return torch.cat([one, other], -1) + y
        return x.roll(1, -1).roll(-1, -1) + y


class Torchs(nn.Module):
    """torch's own encoder layer."""

    def __init__(self, width: int, before: bool, p: float) -> None:
        super().__init__()
        heads = 2 if width % 2 == 0 else 1
        self.layer = nn.TransformerEncoderLayer(width, heads, 2 * width, p, batch_first=True, norm_first=before)
        self.out = width

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# Containers: blocks one after the other, run in several ways.


class Listed(nn.Module):
    """A list of blocks; `how` is the way its code runs them."""

    def __init__(self, blocks: Sequence[nn.Module], how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block{n}": x for n, x in enumerate(blocks)}) if how == "dict" else nn.ModuleList(blocks)
        self.how, self.out = how, blocks[-1].out

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dict":
            for block in self.blocks.values():
                x = block(x)
        elif self.how == "by_number":
            for number in range(self.last + 1):
                x = self.blocks[number](x)
        elif self.how == "all_twice":
            for _ in range(2):
                for block in self.blocks:
                    x = block(x)
        else:
            for block in self.blocks:
                x = block(block(x)) if self.how == "each_twice" else block(x)
        return x


class Stage(nn.Module):
    """Named children that run in sequence, as in RegNet's stages."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, block in enumerate(blocks, 1):
            self.add_module(f"b{number}", block)
        self.out = blocks[-1].out

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class Given(nn.Module):
    """Blocks that all take the same second tensor."""

    def __init__(self, blocks: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.blocks, self.shift, self.out = nn.ModuleList(blocks), nn.Parameter(torch.zeros(width)), width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, shift=self.shift)
        return x


def contain(blocks: Sequence[nn.Module], container: str) -> nn.Module:
    if container == "sequential":
        return b.Chain(blocks, blocks[-1].out)
    if container == "named":
        names = [chr(ord("a") + number) for number in range(len(blocks))]
        return b.keep(nn.Sequential(OrderedDict(zip(names, blocks, strict=True))), blocks[-1].out)
    if container == "tied":
        return b.Chain([*blocks, blocks[0]], blocks[0].out)
    if container == "stage":
        return Stage(blocks)
    listed = Listed(blocks, container)
    listed.last = len(blocks) - 1
    return listed


class Finish(nn.Module):
    """From a stream to the input of a head, as a module, so that a whole network can be one nn.Sequential."""

    def __init__(self, stream: str, head: str) -> None:
        super().__init__()
        self.stream, self.head = stream, head

    def forward(self, x: Tensor) -> Tensor:
        if self.head == "flatten":
            return torch.flatten(x, 1)
        if self.head in ("pool", "adaptive"):
            return x.mean((2, 3)) if self.stream == "image" else x.mean(1)
        return x[:, -1] if self.head == "last" else x


# Builders.


def basic(width: int, net: Any, hidden: int, norm: bool, bias: bool) -> nn.Module:
    return Basic(width, hidden, norm, bias)


def bottleneck(width: int, net: Any, hidden: int, norm: str, after: str) -> nn.Module:
    def normed(layer: nn.Module, n: int) -> list[nn.Module]:
        if norm == "batch":
            return [layer, nn.BatchNorm2d(n)]
        return [layer, nn.GroupNorm(1, n)] if norm == "group" else [layer]

    f = nn.Sequential(
        *normed(nn.Conv2d(width, hidden, 1, bias=False), hidden),
        nn.ReLU(),
        *normed(nn.Conv2d(hidden, hidden, 3, padding=1), hidden),
        nn.ReLU(),
        *normed(nn.Conv2d(hidden, width, 1), width),
    )
    return Sum(width, f, after)


def preactivated(width: int, net: Any, hidden: int) -> nn.Module:
    f = [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, hidden, 3, padding=1, bias=False)]
    return Sum(width, nn.Sequential(*f, nn.BatchNorm2d(hidden), nn.ReLU(), nn.Conv2d(hidden, width, 3, padding=1, bias=False)))


def inverted(width: int, net: Any, hidden: int) -> nn.Module:
    """MobileNet's: expand, depthwise, squeeze-and-excite, project; batch norms and no activation at the end."""
    f = [nn.Conv2d(width, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()]
    f += [nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.Hardswish()]
    f += [b.SqueezeExcite(hidden, 4, "hard"), nn.Conv2d(hidden, width, 1, bias=False), nn.BatchNorm2d(width)]
    return Sum(width, nn.Sequential(*f))


def convnext(width: int, net: Any, scaled: bool) -> nn.Module:
    return ConvNeXt(width, scaled)


def thin(width: int, net: Any, norm: bool, after: str) -> nn.Module:
    """A branch of a single layer."""
    if net.stream == "image":
        layer: nn.Module = nn.Conv2d(width, width, 3, padding=1)
        f = nn.Sequential(layer, nn.BatchNorm2d(width)) if norm else layer
    else:
        f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) if norm else nn.Linear(width, width)
    return Sum(width, f, after)


def odd_conv(width: int, net: Any, out: int, kernel: Any, padding: str, mode: str, dilation: int) -> nn.Module:
    """Convolutions with kernels, paddings and dilations of all sorts."""
    span = [dilation * (k - 1) for k in kernel]
    if padding == "valid" and max(span) >= net.size:
        padding = "same"
    if padding == "number":
        sizes = tuple(s // 2 for s in span)
        layer = nn.Conv2d(width, out, kernel, padding=sizes, dilation=dilation, padding_mode=mode)
    else:
        layer = nn.Conv2d(width, out, kernel, padding=padding, dilation=dilation, padding_mode=mode)
    square = torch.zeros(1, width, net.size, net.size)
    found = layer(square).shape[2:]
    if found[0] != found[1]:  # heads that flatten want a square
        return b.keep(nn.Conv2d(width, out, kernel, padding="same", dilation=dilation, padding_mode=mode), out)
    net.size = found[0]
    return b.keep(layer, out)


def _mlp(width: int, hidden: int, activation: str, p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), b.ACTIVATIONS[activation](), nn.Dropout(p), nn.Linear(hidden, width))


def mlp(width: int, net: Any, hidden: int, activation: str, p: float, scaled: bool) -> nn.Module:
    tail = [b.LayerScale(width, False)] if scaled else []
    return Sum(width, nn.Sequential(nn.LayerNorm(width), _mlp(width, hidden, activation, p), *tail))


def encoder(width: int, net: Any, hidden: int, before: bool, how: str, fused: bool) -> nn.Module:
    return Encoder(width, b.Attention(width, 2, 3, how, "rest", fused, True), _mlp(width, hidden, "gelu", 0.1), before)


def torchs(width: int, net: Any, before: bool, p: float) -> nn.Module:
    return Torchs(width, before, p)


def llama(width: int, net: Any, hidden: int, kv: int) -> nn.Module:
    attend = Sum(width, nn.Sequential(b.WrittenRMSNorm(width, 1e-5), b.GroupedQueryAttention(width, kv, 2, 4, "expand")))
    return b.Chain([attend, Sum(width, nn.Sequential(nn.RMSNorm(width, eps=1e-5), b.Gate(width, hidden, width)))], width)


def weighted(width: int, net: Any, hidden: int, learnt: bool) -> nn.Module:
    return Weighted(width, _pointwise(width, hidden, net), learnt)


def skewed(width: int, net: Any, hidden: int, how: str) -> nn.Module:
    return Skewed(width, _pointwise(width, hidden, net), how)


def ending(width: int, net: Any, hidden: int, how: str) -> nn.Module:
    """Branches that end in a gate, in pooling or in an activation."""
    f = _pointwise(width, 2 * hidden, net)
    image = net.stream == "image"
    if how == "glu":
        last = nn.Conv2d(2 * hidden, 2 * width, 1) if image else nn.Linear(2 * hidden, 2 * width)
        return Sum(width, nn.Sequential(*list(f)[:2], last, nn.GLU(1 if image else -1)))
    if how == "pool":
        return Sum(width, nn.Sequential(*f, nn.MaxPool2d(3, 1, 1) if image else nn.MaxPool1d(3, 1, 1)))
    return Sum(width, nn.Sequential(*f, b.ACTIVATIONS[how]()))


def given(width: int, net: Any, hidden: int, count: int) -> nn.Module:
    if net.stream == "image":
        return Sum(width, _pointwise(width, hidden, net))
    return Given([Shifted(width, _pointwise(width, hidden, net)) for _ in range(count)], width)


def _pointwise(width: int, hidden: int, net: Any) -> nn.Module:
    if net.stream == "image":
        return nn.Sequential(nn.Conv2d(width, hidden, 1), nn.SiLU(), nn.Conv2d(hidden, width, 1))
    return nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))


BOTH = {"thin": thin, "weighted": weighted, "skewed": skewed, "ending": ending, "given": given}
IMAGE = BOTH | {
    "basic": basic,
    "bottleneck": bottleneck,
    "preactivated": preactivated,
    "inverted": inverted,
    "convnext": convnext,
    "odd_conv": odd_conv,
}
SEQUENCE = BOTH | {"mlp": mlp, "encoder": encoder, "torchs": torchs, "llama": llama}
