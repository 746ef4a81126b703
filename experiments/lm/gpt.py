"""The language model of the study: pre-norm blocks with RMSNorm, rotary positions, and a plain MLP, on bytes.

It has no code for growth. Sizes are read from the weights wherever they may grow, as in any library's model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Size:
    """Layers, width of the residual stream, heads, hidden units of each MLP; heads have `head` entries."""

    layers: int
    width: int
    heads: int
    hidden: int
    head: int = 64

    def __str__(self) -> str:
        return f"{self.layers} × {self.width} ({self.heads} heads, {self.hidden} hidden)"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (batch, time, heads, entries)."""
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        inner = size.heads * size.head
        self.head = size.head
        self.q = nn.Linear(size.width, inner, bias=False)
        self.k = nn.Linear(size.width, inner, bias=False)
        self.v = nn.Linear(size.width, inner, bias=False)
        self.o = nn.Linear(inner, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (layer(x).view(batch, time, -1, self.head) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(batch, time, -1))
        return result


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width, eps=1e-6), nn.RMSNorm(size.width, eps=1e-6)
        self.attention, self.mlp = Attention(size), MLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits of the next byte, (batch, time, 256)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        angles = torch.arange(context)[:, None] / 10_000 ** (torch.arange(0, size.head, 2) / size.head)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        time = text.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, cos, sin)
        result: Tensor = self.head(self.norm(x))
        return result


def build(size: Size, context: int, seed: int) -> GPT:
    """A model with random weights; what writes to the residual stream starts smaller, by the number of its writers."""
    model = GPT(size, context)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                writes = name.endswith(("o.weight", "down.weight"))
                deviation = 0.02 / (2 * size.layers) ** 0.5 if writes else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    return model


def size_of(model: GPT) -> Size:
    """The size of a model, read from its weights."""
    first = model.blocks[0]
    head = int(first.attention.head)
    return Size(
        len(model.blocks),
        model.embedding.weight.shape[1],
        first.attention.q.weight.shape[0] // head,
        first.mlp.up.weight.shape[0],
        head,
    )


def training_flops(size: Size, batch: int, context: int) -> int:
    """FLOPs of a training step: forward and backward pass of all matrix products, attention scores over the whole context."""
    inner = size.heads * size.head
    weights = size.layers * (4 * size.width * inner + 2 * size.width * size.hidden) + size.width * BYTES
    scores = size.layers * 2 * inner * context
    return 6 * batch * context * (weights + scores)
