"""Small pieces of networks, each written the way people write it; `networks` puts them together at random.

Image blocks map (batch, width, h, w) to the same kind, sequence blocks (batch, tokens, width). Every block has its `out`
width, so that the next one can be built.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "hardswish": nn.Hardswish,
    "softplus": nn.Softplus,
    "leaky": nn.LeakyReLU,
}


class Chain(nn.Sequential):
    """Blocks one after the other."""

    def __init__(self, blocks: Sequence[nn.Module], out: int) -> None:
        super().__init__(*blocks)
        self.out = out


def keep(module: nn.Module, width: int) -> nn.Module:
    module.out = width
    return module


class ChannelsFirst(nn.Module):
    """A layer for (batch, width, tokens) inside a sequence."""

    def __init__(self, inner: nn.Module, out: int) -> None:
        super().__init__()
        self.inner, self.out = inner, out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class ChannelsLast(nn.Module):
    """A layer for (…, width) inside an image."""

    def __init__(self, inner: nn.Module, out: int) -> None:
        super().__init__()
        self.inner, self.out = inner, out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Volumetric(nn.Module):
    """A three-dimensional convolution over an image taken as one slice."""

    def __init__(self, inner: nn.Module, out: int) -> None:
        super().__init__()
        self.inner, self.out = inner, out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.unsqueeze(2)).mean(dim=2)


class WrittenRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.out = eps, width

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class WrittenLayerNorm(nn.Module):
    def __init__(self, width: int, eps: float, how: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.how, self.out = eps, how, width

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.how == "var":
            variance = x.var(-1, unbiased=False, keepdim=True)
            return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) * torch.rsqrt(variance + self.eps)) + self.bias


class WrittenLayerNorm2d(nn.Module):
    """Over the channels of an image, in place of a permutation."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.out = eps, width

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class LayerScale(nn.Module):
    def __init__(self, width: int, image: bool) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.image, self.out = image, width

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.gamma.view(1, -1, 1, 1) if self.image else self.gamma)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, hidden: int, how: str) -> None:
        super().__init__()
        self.how, self.out = how, width
        if how == "linear":
            self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        else:
            self.fc1, self.fc2 = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "linear":
            gate = self.fc2(F.relu(self.fc1(x.mean((2, 3))))).sigmoid()
            return x * gate[:, :, None, None]
        gate = self.fc2(F.silu(self.fc1(F.adaptive_avg_pool2d(x, 1))))
        return x * (F.hardsigmoid(gate) if self.how == "hard" else torch.sigmoid(gate))


class Gated(nn.Module):
    """GLU and its kin: one half gates the other."""

    def __init__(self, project: nn.Module, out: int, axis: int, how: str) -> None:
        super().__init__()
        self.project, self.axis, self.how, self.out = project, axis, how, out

    def forward(self, x: Tensor) -> Tensor:
        both = self.project(x)
        if self.how == "glu":
            return F.glu(both, dim=self.axis)
        if self.how == "chunk":
            value, gate = both.chunk(2, dim=self.axis)
        else:
            value, gate = both.split(both.shape[self.axis] // 2, dim=self.axis)
        return value * F.silu(gate)


class Gate(nn.Module):
    """SwiGLU with two projections."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, out, bias=False)
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Concatenate(nn.Module):
    """DenseNet and Inception: branches side by side, perhaps with the input."""

    def __init__(self, branches: Sequence[nn.Module], width: int, axis: int, with_input: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.axis, self.with_input = axis, with_input
        self.out = sum(branch.out for branch in branches) + (width if with_input else 0)

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        return torch.cat([x, *parts] if self.with_input else parts, dim=self.axis)


class Halves(nn.Module):
    """Cross-stage partial: one part of the channels is worked on, the other passes."""

    def __init__(self, inner: nn.Module, width: int, axis: int, how: str) -> None:
        super().__init__()
        self.inner, self.axis, self.how = inner, axis, how
        self.cut = width // 2
        self.out = width - width // 2 + inner.out

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "chunk":
            one, other = x.chunk(2, dim=self.axis)
        elif self.how == "split":
            one, other = x.split([self.cut, x.shape[self.axis] - self.cut], dim=self.axis)
        else:
            one, other = x.narrow(self.axis, 0, self.cut), x.narrow(self.axis, self.cut, x.shape[self.axis] - self.cut)
        return torch.cat([other, self.inner(one)], dim=self.axis)


class Residual(nn.Module):
    def __init__(self, body: nn.Module, shortcut: nn.Module | None, after: nn.Module | None, axis: int) -> None:
        super().__init__()
        self.body, self.shortcut, self.after, self.axis, self.out = body, shortcut, after, axis, body.out

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif y.shape[self.axis] > x.shape[self.axis]:
            missing = y.shape[self.axis] - x.shape[self.axis]
            x = F.pad(x, (0, 0) * (x.ndim - 1 - self.axis % x.ndim) + (0, missing))
        y = x + y
        return y if self.after is None else self.after(y)


class Twice(nn.Module):
    """One layer used two times: tied weights."""

    def __init__(self, inner: nn.Module, between: nn.Module, out: int) -> None:
        super().__init__()
        self.inner, self.between, self.out = inner, between, out

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.between(self.inner(x)))


class Resize(nn.Module):
    def __init__(self, mode: str, out: int) -> None:
        super().__init__()
        self.mode, self.out = mode, out

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=self.mode)


class MergePairs(nn.Module):
    """Patch merging: every two tokens become one."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.reduction, self.out = nn.Linear(2 * width, out), out

    def forward(self, x: Tensor) -> Tensor:
        even = x.shape[1] // 2 * 2
        return self.reduction(torch.cat([x[:, 0:even:2], x[:, 1:even:2]], dim=-1))


class Position(nn.Module):
    """Learnt positions, cut to the length of the sequence."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.zeros(1, tokens, width)), width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, : x.shape[1]]


class Recurrent(nn.Module):
    def __init__(self, width: int, hidden: int, kind: str, layers: int, both_ways: bool) -> None:
        super().__init__()
        cell = nn.LSTM if kind == "lstm" else nn.GRU
        self.cell = cell(width, hidden, num_layers=layers, bidirectional=both_ways, batch_first=True)
        self.out = hidden * (1 + both_ways)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Attention(nn.Module):
    """Multi-head attention; `how` is the spelling of the projections, `end` that of the merge."""

    def __init__(self, width: int, heads: int, depth: int, how: str, end: str, fused: bool, bias: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.how, self.end, self.fused = heads, depth, how, end, fused
        self.scale = depth**-0.5
        inner = heads * depth
        if how in ("qkv", "qkv_chunk"):
            self.qkv = nn.Linear(width, 3 * inner, bias=bias)
        else:
            self.q_proj, self.k_proj = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
            self.v_proj = nn.Linear(width, inner, bias=bias)
        self.proj, self.out = nn.Linear(inner, width), width

    def heads_of(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if self.how == "qkv":
            q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.how == "qkv_chunk":
            q, k, v = (self.heads_of(part) for part in self.qkv(x).chunk(3, dim=-1))
        else:
            q, k, v = self.heads_of(self.q_proj(x)), self.heads_of(self.k_proj(x)), self.heads_of(self.v_proj(x))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        y = y.transpose(1, 2)
        if self.end == "same":
            return self.proj(y.reshape(x.shape))
        return self.proj(y.reshape(b, n, -1) if self.end == "rest" else y.flatten(2))


class GroupedQueryAttention(nn.Module):
    """Llama's: fewer heads of keys and values, each serving several of queries."""

    def __init__(self, width: int, kv_heads: int, group: int, depth: int, how: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.how = kv_heads * group, kv_heads, depth, how
        self.group = group
        self.q_proj = nn.Linear(width, self.num_heads * depth, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * depth, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * depth, bias=False)
        self.o_proj, self.out = nn.Linear(self.num_heads * depth, width, bias=False), width

    def shared(self, x: Tensor) -> Tensor:
        if self.how == "interleave":
            return x.repeat_interleave(self.group, dim=1)
        b, heads, n, depth = x.shape
        return x[:, :, None].expand(b, heads, self.group, n, depth).reshape(b, heads * self.group, n, depth)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        scores = q @ self.shared(k).transpose(2, 3) / math.sqrt(self.head_dim)
        y = scores.softmax(dim=-1) @ self.shared(v)
        return self.o_proj(y.transpose(1, 2).contiguous().view(b, n, -1))


class SelfAttention(nn.Module):
    """torch's own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True), width

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class OverPlaces(nn.Module):
    """A sequence block over the places of an image."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, inner.out

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        y = self.inner(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).reshape(b, -1, h, w)
