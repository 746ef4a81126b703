"""Small networks made from data: a *program* says which blocks, `build` makes the network.

A program is plain data (printable, and small after shrinking): the kind of stream, its stem, a list of steps and a head. Steps
adapt to the width they meet, so that any list of them is a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers import block_stacks as stacks
from tests.helpers import computed_weights as computed
from tests.helpers import layer_blocks as b
from tests.helpers.random_weights import DTYPE, randomise

CHANNELS, FEATURES, VOCABULARY, CLASSES = 3, 5, 11, 4
SIZE, TOKENS = 6, 6


@dataclass(frozen=True)
class Step:
    """One layer of a program."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Step({self.kind!r}, {dict(self.options)!r})"


@dataclass(frozen=True)
class Program:
    """A network as data."""

    stream: str  # "image", "sequence" or "tokens"
    width: int
    steps: tuple[Step, ...]
    head: str
    seed: int = 0
    flat: bool = False  # the whole network is one nn.Sequential


class Network(nn.Module):
    """Interprets a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stream, self.head_kind = program.stream, program.head
        width, self.size = program.width, SIZE if program.stream == "image" else TOKENS
        if program.stream == "image":
            self.stem = nn.Conv2d(CHANNELS, width, 3, padding=1)
        elif program.stream == "sequence":
            self.stem = nn.Linear(FEATURES, width)
        else:
            self.stem = nn.Embedding(VOCABULARY, width)
        table = IMAGE if program.stream == "image" else SEQUENCE
        layers = []
        for step in program.steps:
            layer = table[step.kind](width, self, **step.options)
            layers.append(layer)
            width = layer.out
        self.layers = nn.ModuleList(layers)
        if program.head == "flatten":
            self.head = nn.Linear(width * (self.size**2 if program.stream == "image" else self.size), CLASSES)
        elif program.head == "conv":
            self.head = nn.Conv2d(width, CLASSES, 1)
        elif program.head == "tied" and width == program.width:
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.stem.weight
        else:
            self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        if self.head_kind == "flatten":
            x = torch.flatten(x, 1)
        elif self.head_kind == "pool":
            x = x.mean((2, 3)) if self.stream == "image" else x.mean(1)
        elif self.head_kind == "adaptive":
            x = nn.functional.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)
        elif self.head_kind == "last":
            x = x[:, -1]
        return self.head(x)


def build(program: Program) -> nn.Module:
    """The network, in float64 with every parameter and buffer random, whatever its constructor set."""
    generator = torch.Generator().manual_seed(program.seed)
    with torch.random.fork_rng(devices=[]):
        model = Network(program).to(DTYPE)
    if program.flat:
        model = nn.Sequential(model.stem, *model.layers, stacks.Finish(program.stream, program.head), model.head)
    randomise(model, generator)
    return model.eval()


def inputs(program: Program, batch: int, seed: int, size: int | None = None) -> Tensor:
    """Fresh inputs of a batch size; `size` is that of the image or the sequence."""
    generator = torch.Generator().manual_seed(seed)
    if program.stream == "image":
        return torch.randn(batch, CHANNELS, size or SIZE, size or SIZE, generator=generator, dtype=DTYPE)
    if program.stream == "sequence":
        return torch.randn(batch, size or TOKENS, FEATURES, generator=generator, dtype=DTYPE)
    return torch.randint(VOCABULARY, (batch, size or TOKENS), generator=generator)


# Builders: (width, network, options) → block. `network.size` is the size of the image or sequence at that point.


def conv(width: int, net: Network, out: int, kernel: int, stride: int, groups: int, bias: bool) -> nn.Module:
    groups = groups if width % groups == 0 and out % groups == 0 else 1
    stride = stride if net.size >= 4 else 1
    net.size = (net.size + 2 * (kernel // 2) - kernel) // stride + 1
    return b.keep(nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=bias), out)


def transposed(width: int, net: Network, out: int, stride: int, groups: int) -> nn.Module:
    groups = groups if width % groups == 0 and out % groups == 0 else 1
    stride = stride if net.size <= 4 else 1
    net.size = (net.size - 1) * stride + 2
    return b.keep(nn.ConvTranspose2d(width, out, 2, stride, groups=groups), out)


def depthwise(width: int, net: Network, times: int) -> nn.Module:
    return b.keep(nn.Conv2d(width, width * times, 3, padding=1, groups=width), width * times)


def volumetric(width: int, net: Network, out: int) -> nn.Module:
    return b.Volumetric(nn.Conv3d(width, out, 3, padding=1), out)


def group_norm(width: int, net: Network, groups: int, affine: bool) -> nn.Module:
    return b.keep(nn.GroupNorm(groups if width % groups == 0 else 1, width, affine=affine), width)


def norm2d(width: int, net: Network, how: str) -> nn.Module:
    if how == "batch" or net.size < 2:
        return b.keep(nn.BatchNorm2d(width), width)
    if how == "batch_plain":
        return b.keep(nn.BatchNorm2d(width, affine=False), width)
    if how == "layer":
        return b.ChannelsLast(nn.LayerNorm(width), width)
    if how == "rms":
        return b.ChannelsLast(nn.RMSNorm(width, eps=1e-5), width)
    if how == "layer_written":
        return b.WrittenLayerNorm2d(width, 1e-5)
    return b.keep(
        nn.InstanceNorm2d(width, affine=how == "instance_affine", track_running_stats=how == "instance_tracked"), width
    )


def norm1d(width: int, net: Network, how: str) -> nn.Module:
    if how == "layer":
        return b.keep(nn.LayerNorm(width), width)
    if how == "layer_plain":
        return b.keep(nn.LayerNorm(width, elementwise_affine=False), width)
    if how == "rms":
        return b.keep(nn.RMSNorm(width, eps=1e-5), width)
    if how == "rms_written":
        return b.WrittenRMSNorm(width, 1e-5)
    if how == "batch":
        return b.ChannelsFirst(nn.BatchNorm1d(width), width)
    return b.WrittenLayerNorm(width, 1e-5, how.removeprefix("layer_"))


def activation(width: int, net: Network, name: str) -> nn.Module:
    if name == "relu_":  # in place, behind a layer whose output nobody else needs
        return b.Chain([plain(net, width, width), nn.ReLU(inplace=True)], width)
    return b.keep(b.ACTIVATIONS[name](), width)


def prelu(width: int, net: Network, each: bool) -> nn.Module:
    layer = nn.PReLU(width if each else 1)
    return b.keep(layer, width) if net.stream == "image" or not each else b.ChannelsFirst(layer, width)


def layer_scale(width: int, net: Network) -> nn.Module:
    return b.LayerScale(width, net.stream == "image")


def squeeze_excite(width: int, net: Network, hidden: int, how: str) -> nn.Module:
    return b.SqueezeExcite(width, hidden, how)


def glu(width: int, net: Network, out: int, how: str) -> nn.Module:
    if net.stream == "image":
        return b.Gated(nn.Conv2d(width, 2 * out, 1), out, 1, how)
    return b.Gated(nn.Linear(width, 2 * out), out, -1, how)


def shuffle(width: int, net: Network, out: int, up: bool) -> nn.Module:
    if up and net.size <= 4:
        net.size *= 2
        return b.Chain([nn.Conv2d(width, 4 * out, 1), nn.PixelShuffle(2)], out)
    if not up and net.size % 2 == 0 and net.size > 2:
        net.size //= 2
        return b.keep(nn.PixelUnshuffle(2), 4 * width)
    return b.keep(nn.ReLU(), width)


def pool(width: int, net: Network, how: str) -> nn.Module:
    if net.size < 4:
        return b.keep(nn.Identity(), width)
    if how == "adaptive":
        net.size = 2
        return b.keep(nn.AdaptiveAvgPool2d(2), width)
    net.size //= 2
    return b.keep(nn.MaxPool2d(2) if how == "max" else nn.AvgPool2d(2), width)


def resize(width: int, net: Network, mode: str) -> nn.Module:
    if net.size > 4:
        return b.keep(nn.Identity(), width)
    net.size *= 2
    return b.Resize(mode, width)


def dropout(width: int, net: Network, p: float, whole: bool) -> nn.Module:
    return b.keep(nn.Dropout2d(p) if whole and net.stream == "image" else nn.Dropout(p), width)


def plain(net: Network, width: int, out: int) -> nn.Module:
    return b.keep(nn.Conv2d(width, out, 1) if net.stream == "image" else nn.Linear(width, out), out)


def body_of(width: int, net: Network, steps: Sequence[Step], end: int | None = None) -> b.Chain:
    """Steps that keep the size; with `end`, brought back to a width."""
    table, layers = IMAGE if net.stream == "image" else SEQUENCE, []
    for step in steps:
        layer = table[step.kind](width, net, **step.options)
        layers.append(layer)
        width = layer.out
    if end is not None and (width != end or not layers):
        layers.append(plain(net, width, end))
        width = end
    return b.Chain(layers, width)


def residual(width: int, net: Network, body: Sequence[Step], shortcut: str, after: bool) -> nn.Module:
    axis = 1 if net.stream == "image" else -1
    inner = body_of(width, net, body, width if shortcut == "identity" else None)
    project = None
    if shortcut == "projection" or inner.out < width:
        project = plain(net, width, inner.out)
    return b.Residual(inner, project, nn.ReLU() if after else None, axis)


def concatenate(width: int, net: Network, one: Sequence[Step], other: Sequence[Step], with_input: bool) -> nn.Module:
    branches = [body_of(width, net, steps) for steps in (one, other)]
    return b.Concatenate(branches, width, 1 if net.stream == "image" else -1, with_input)


def halves(width: int, net: Network, body: Sequence[Step], how: str) -> nn.Module:
    inner = body_of(width - width // 2 if how == "chunk" else width // 2, net, body)
    block = b.Halves(inner, width, 1 if net.stream == "image" else -1, how)
    block.out = inner.out + (width // 2 if how == "chunk" else width - width // 2)
    return block


def twice(width: int, net: Network, name: str) -> nn.Module:
    inner = nn.Conv2d(width, width, 3, padding=1) if net.stream == "image" else nn.Linear(width, width)
    return b.Twice(inner, b.ACTIVATIONS[name](), width)


def stack(width: int, net: Network, pattern: Sequence[Step], count: int, container: str) -> nn.Module:
    """Blocks that repeat a pattern, in a container; only those that keep their width and size can be run twice."""
    table, layers, start, size = IMAGE if net.stream == "image" else SEQUENCE, [], width, net.size
    for step in tuple(pattern) * count:
        layers.append(table[step.kind](width, net, **step.options))
        width = layers[-1].out
    once = any(layer.out != start for layer in layers) or net.size != size
    return stacks.contain(layers, "sequential" if once and container in ("each_twice", "all_twice", "tied") else container)


def linear(width: int, net: Network, out: int, bias: bool) -> nn.Module:
    return b.keep(nn.Linear(width, out, bias=bias), out)


def conv1d(width: int, net: Network, out: int, groups: int) -> nn.Module:
    groups = groups if width % groups == 0 and out % groups == 0 else 1
    return b.ChannelsFirst(nn.Conv1d(width, out, 3, padding=1, groups=groups), out)


def attention(width: int, net: Network, heads: int, depth: int, how: str, end: str, fused: bool, bias: bool) -> nn.Module:
    if end == "same":
        heads, depth = (heads, width // heads) if width % heads == 0 else (1, width)
    return over(net, b.Attention(width, heads, depth, how, end, fused, bias))


def over(net: Network, block: nn.Module) -> nn.Module:
    return b.OverPlaces(block) if net.stream == "image" else block


def grouped_queries(width: int, net: Network, kv: int, group: int, depth: int, how: str) -> nn.Module:
    return b.GroupedQueryAttention(width, kv, group, depth, how)


def torch_attention(width: int, net: Network, heads: int) -> nn.Module:
    return b.SelfAttention(width, heads if width % heads == 0 else 1)


def swiglu(width: int, net: Network, hidden: int, out: int) -> nn.Module:
    return b.Gate(width, hidden, out)


def recurrent(width: int, net: Network, hidden: int, cell: str, layers: int, both_ways: bool) -> nn.Module:
    return b.Recurrent(width, hidden, cell, layers, both_ways)


def merge(width: int, net: Network, out: int) -> nn.Module:
    if net.size < 2:
        return b.keep(nn.Identity(), width)
    net.size //= 2
    return b.MergePairs(width, out)


def position(width: int, net: Network) -> nn.Module:
    return b.Position(width, max(net.size, 1) + 3)


def learned_queries(
    width: int, net: Network, queries: int, code: int, steps: Sequence[Any], out: int, features: bool
) -> nn.Module:
    net.size = queries
    return computed.LearnedQueries(width, queries, code, steps, out, features)


def computed_linear(width: int, net: Network, out: int, code: int, steps: Sequence[Any], bias: bool, turned: bool) -> nn.Module:
    return computed.ComputedLinear(width, out, code, steps, bias, turned)


Builder = Callable[..., nn.Module]
BOTH: dict[str, Builder] = {
    "activation": activation,
    "prelu": prelu,
    "layer_scale": layer_scale,
    "glu": glu,
    "dropout": dropout,
    "attention": attention,
    "residual": residual,
    "concatenate": concatenate,
    "halves": halves,
    "twice": twice,
    "stack": stack,
}
IMAGE: dict[str, Builder] = (
    BOTH
    | stacks.IMAGE
    | {
        "conv": conv,
        "transposed": transposed,
        "depthwise": depthwise,
        "volumetric": volumetric,
        "group_norm": group_norm,
        "norm": norm2d,
        "squeeze_excite": squeeze_excite,
        "shuffle": shuffle,
        "pool": pool,
        "resize": resize,
    }
)
SEQUENCE: dict[str, Builder] = (
    BOTH
    | stacks.SEQUENCE
    | {
        "linear": linear,
        "conv1d": conv1d,
        "norm": norm1d,
        "grouped_queries": grouped_queries,
        "torch_attention": torch_attention,
        "swiglu": swiglu,
        "recurrent": recurrent,
        "merge": merge,
        "position": position,
        "learned_queries": learned_queries,
        "computed_linear": computed_linear,
    }
)
