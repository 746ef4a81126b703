"""Small models as people write them by hand: a GPT with its own attention or PyTorch's, mixtures of experts, a mixer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 30, 24, 4, 40, 8
HEAD_DIM = WIDTH // HEADS


class HandWrittenAttention(nn.Module):
    """Softmax attention in elementary operators, with a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf"))
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


class GroupedAttention(nn.Module):
    """Grouped queries by einsum: `groups` key heads, each for HEADS / groups query heads; one group is multi-query."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, groups * HEAD_DIM), nn.Linear(WIDTH, groups * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.groups, -1, HEAD_DIM))
        k, v = (layer(x).unflatten(-1, (self.groups, HEAD_DIM)) for layer in (self.k, self.v))
        weights = torch.einsum("blgrd,bmgd->bgrlm", q, k).softmax(-1)
        return self.out(torch.einsum("bgrlm,bmgd->blgrd", weights, v).flatten(2))


class GatedMLP(nn.Module):
    """Gate, up and down projections with the nonlinearity written out."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes) for sizes in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class ListedExperts(nn.Module):
    """A router, and experts in an `nn.ModuleList`; all experts run, and the weights of those not chosen are zero."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


class StackedExperts(nn.Module):
    """Experts as stacked weights, multiplied in one batch."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat)
        kept = torch.full_like(scores, float("-inf")).scatter(-1, *_top(scores))
        hidden = torch.relu(flat.expand(len(self.up), *flat.shape) @ self.up)
        return ((hidden @ self.down) * kept.softmax(-1).T[..., None]).sum(0).view(x.shape)


def _top(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, index = scores.topk(2, dim=-1)
    return index, values


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module], mlp: type[nn.Module], post_norm: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.post_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), post_norm
        self.attention, self.mlp = attention(), mlp()

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self,
        attention: type[nn.Module] = HandWrittenAttention,
        mlp: type[nn.Module] = GatedMLP,
        layers: int = 2,
        tied: bool = False,
        post_norm: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(attention, mlp, post_norm) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Mixer(nn.Module):
    """Alternates MLPs over tokens, an axis without units, and over channels."""

    def __init__(self, tokens: int = LENGTH, hidden: int = 10, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mix_tokens, self.mix_channels = GatedMLP(tokens, hidden), GatedMLP()
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.mix_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.mix_channels(self.norms[1](x))
        return F.relu(self.head(x.mean(1)))
