"""Bags of embeddings and samples of maps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons
from tests.helpers.judging import assert_learns, assert_same_function


def tokens(batch: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 11, (batch, 5), generator=torch.Generator().manual_seed(seed))


def maps(batch: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


class Bag(nn.Module):
    def __init__(self, mode: str, weighted: bool = False) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(11, 6, mode=mode, padding_idx=0), nn.Linear(6, 3)
        self.importance = nn.Embedding(11, 1) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        weights = None if self.importance is None else self.importance(x).squeeze(-1)
        return self.out(self.bag(x, per_sample_weights=weights).tanh())


class Normed(nn.Module):
    """The mean of rows, under an RMS norm, which needs zeros to stay zero."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.norm, self.out = nn.EmbeddingBag(11, 6), nn.RMSNorm(6, eps=1e-5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.bag(x)))


class Transformed(nn.Module):
    """A spatial transformer."""

    def __init__(self, mode: str = "bilinear") -> None:
        super().__init__()
        self.conv, self.hidden, self.theta = nn.Conv2d(3, 4, 3), nn.Linear(3, 5), nn.Linear(5, 6)
        self.out, self.mode = nn.Conv2d(4, 2, 1), mode

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x)
        theta = self.theta(self.hidden(x.mean((2, 3))).tanh()).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), seen.shape[1], 5, 5], align_corners=False)
        return self.out(F.grid_sample(seen, grid, self.mode, align_corners=False).relu())


class Deformable(nn.Module):
    """Each head takes samples of its own channels at points of its own, as in Deformable DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.points = 2, 3
        self.value, self.where = nn.Conv2d(3, 2 * 4, 1), nn.Linear(3, 2 * 3 * 2)
        self.weight, self.out = nn.Linear(3, 2 * 3), nn.Linear(2 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, query = len(x), x.mean((2, 3))
        value = self.value(x).view(batch, self.heads, -1, *x.shape[2:]).flatten(0, 1)
        where = self.where(query).tanh().view(batch * self.heads, 1, self.points, 2)
        taken = F.grid_sample(value, where, align_corners=False).squeeze(2)  # (batch · heads, channels, points)
        weight = self.weight(query).view(batch * self.heads, 1, self.points)
        return self.out((taken * weight).sum(-1).view(batch, -1))


@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_features_of_bags_grow_exactly(mode: str, weighted: bool) -> None:
    model = randomised(Bag(mode, weighted))
    found = growable(model, tokens(4))
    assert found["bag"] == ("r2r", "net2net", "netmorph", "mean")
    assert_exact_everywhere(model, tokens(4), tokens(7, 1), {"bag"})
    with pytest.raises(outgrow.GrowthError, match="looked up by the model's input"):
        outgrow.widen(model, tokens(4), "bag#2", by=2)
    outgrow.widen(model, tokens(4), "bag", by=2)
    assert (model.bag.embedding_dim, model.bag.num_embeddings) == (8, 11)
    assert_learns(model, tokens(7, 1))


def test_a_bag_with_offsets_grows_exactly() -> None:
    class Offsets(Bag):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
            return self.out(self.bag(x, offsets).tanh())

    model = randomised(Offsets("mean"))
    old, x = copy.deepcopy(model), tokens(4).flatten()
    outgrow.widen(model, (x, torch.tensor([0, 3, 9])), "bag", by=4)
    assert_same_function(old, model, [(x, torch.tensor([0, 5, 5, 11]))])  # one of the bags is empty


def test_zeros_of_a_mean_stay_zero_under_a_norm_and_those_of_new_rows_too() -> None:
    model = randomised(Normed())
    assert "netmorph" in growable(model, tokens(4))["bag"]
    assert_exact_everywhere(model, tokens(4), tokens(7, 1), {"bag"})
    old, words = copy.deepcopy(model), tokens(7, 1)
    outgrow.widen(model, tokens(4), kind="vocab", by=3)
    assert model.bag.weight.shape == (14, 6)
    assert_same_function(old, model, [words])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_channels_that_are_sampled_grow_and_coordinates_do_not(mode: str) -> None:
    model = randomised(Transformed(mode))
    assert_exact_everywhere(model, maps(2), maps(3, 1), {"conv", "hidden"})
    assert reasons(model, maps(2))["theta"] == "its indices are those of an affine map"


def test_heads_channels_and_points_of_deformable_attention_grow() -> None:
    model, x = randomised(Deformable()), maps(2)
    growing = [volume for volume in outgrow.volumes(model, x) if volume.growable]
    grown = {}
    for volume in growing:
        for method in volume.methods:
            new = copy.deepcopy(model)
            outgrow.widen(new, x, volume.name, by=2 * volume.size, method=method)
            assert_same_function(model, new, [x, maps(3, 1)])
            grown[volume.name] = new.heads, new.points, new.value.out_channels
    assert sorted(grown.values()) == [(2, 3, 24), (2, 9, 8), (6, 3, 24)]
    assert "its indices are coordinates" in reasons(model, x).values()
