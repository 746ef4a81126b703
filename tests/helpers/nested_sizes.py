"""Small families, and the same sizes grown apart from each other, for comparison."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.random_weights import randomise

SIZES: list[Any] = [
    outgrow.Widen("0", factor=1.5),
    [outgrow.Widen("*", factor=4 / 3, method="netmorph"), outgrow.Kernel("3", 5)],
    outgrow.Widen("*", by=4),
]


def cnn(seed: int = 0) -> nn.Sequential:
    """Two convolutions with batch norms, in float64, all values random."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    ).double()
    randomise(model, torch.Generator().manual_seed(seed))
    return model


class Recurrent(nn.Module):
    """Gates that are fused into one weight, of which each grows at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.cells(x)[0])
        return result


class Tied(nn.Module):
    """An embedding that is also the last layer, around attention with fused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.embedding(text)))
        return result


def images(count: int = 5, seed: int = 1) -> Tensor:
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grown_apart(model: nn.Module, example: Any, sizes: Sequence[Any], seed: int = 0) -> list[nn.Module]:
    """The sizes as separate models: each a copy of the one before, grown by `outgrow.grow`."""
    models = [copy.deepcopy(model)]
    for number, size in enumerate(sizes):
        models.append(copy.deepcopy(models[-1]))
        outgrow.grow(models[-1], example, *(size if isinstance(size, list) else [size]), seed=seed + number)
    return models


def logits(model: nn.Module, example: Any) -> Tensor:
    output = model(**example) if isinstance(example, dict) else model(example)
    result: Tensor = getattr(output, "logits", output)
    return result


def state_of(*things: Any) -> list[Tensor]:
    """Copies of all tensors of models and optimizers, with their types."""
    found: list[Tensor] = []
    for thing in things:
        tree = thing.state_dict()
        found += [t.detach().clone() for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return found


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
