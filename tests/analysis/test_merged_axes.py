"""Parameters with an axis of heads and an axis of features, which a view or an einsum merges before a product."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import assert_learns, assert_same_function
from tests.helpers.random_weights import randomise_parameters

WIDTH, HEADS, FEATURES = 8, 4, 6


class Attention(nn.Module):
    """Weights as in JAX: q, k and v (width, heads, features), output (heads, features, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(WIDTH, HEADS, FEATURES)) for _ in range(3))
        self.bias = nn.Parameter(torch.empty(HEADS, FEATURES))
        self.out = nn.Parameter(torch.empty(HEADS, FEATURES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,chd->bhtd", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.einsum("bhtd,bhsd->bhts", q + self.bias[:, None], k).softmax(-1)
        return x + torch.einsum("bhtd,hdc->btc", scores @ v, self.out)


class Flattened(nn.Module):
    """A hidden layer of heads × features units, with merged axes on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(WIDTH, HEADS, FEATURES))
        self.down = nn.Parameter(torch.empty(HEADS, FEATURES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.up.flatten(1)) @ self.down.flatten(0, 1)


class Contracted(Flattened):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(torch.tensordot(x, self.up, 1).relu(), self.down, 2)


@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph"])
@pytest.mark.parametrize(
    ("kind", "where", "shape"),
    [
        (Attention, "q#2", (6, FEATURES, WIDTH)),
        (Flattened, "up", (HEADS, 8, WIDTH)),
        (Flattened, "up#2", (6, FEATURES, WIDTH)),
        (Contracted, "up#2", (6, FEATURES, WIDTH)),
    ],
)
def test_axes_that_a_view_merges_grow_one_at_a_time(
    kind: type[nn.Module], where: str, shape: tuple[int, ...], method: str
) -> None:
    model = randomise_parameters(kind().double())
    old = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    example, *others = (
        torch.randn(*size, WIDTH, generator=generator, dtype=torch.float64) for size in ((3, 5), (2, 9), (4, 1))
    )
    outgrow.widen(model, example, where, by=2, method=method)
    assert tuple(list(model.parameters())[-1].shape) == shape
    assert_same_function(old, model, [example, *others])
    assert_learns(model, example)


def test_heads_of_merged_axes_are_of_the_kind_heads() -> None:
    model = randomise_parameters(Attention().double())
    example = torch.randn(3, 5, WIDTH, dtype=torch.float64)
    sizes = {volume.kind: volume.size for volume in outgrow.volumes(model, example) if volume.methods}
    assert sizes == {"heads": HEADS, "head_dim": FEATURES}
