"""The size of a head: new features cancel in q·kᵀ, and queries make up for a scale that follows the size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers.library_models import FAMILIES
from tests.helpers.random_weights import randomise_parameters

BY_NAME = {str(family): family for family in FAMILIES}
X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Attention(nn.Module):
    """Attention with 3 heads of 4 features; how: where 1/√size comes from. norm: a norm over queries and keys."""

    def __init__(self, how: str, packed: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.how, self.size, self.packed = how, 4, packed
        self.qkv = nn.Linear(12, 36) if packed else nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 12)
        self.scale = 4**-0.5
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1) if self.packed else [layer(x) for layer in self.qkv]
        q, k, v = (part.view(*x.shape[:2], -1, self.size).transpose(1, 2) for part in parts)
        q, k = self.norm(q), self.norm(k)
        if self.how == "kernel":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.mT
            scores = {
                "attribute": lambda: scores * self.scale,
                "size": lambda: scores / math.sqrt(self.size),
                "number": lambda: scores * 0.5,
                "quotient": lambda: scores / math.sqrt(4),
                "none": lambda: scores,
            }[self.how]()
            y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", ["kernel", "attribute", "size", "none", "number", "quotient"])
def test_the_size_of_heads_grows(how: str, packed: bool) -> None:
    model = randomise_parameters(Attention(how, packed).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(X).square().mean().backward()
    optimizer.step()
    before = model(X).detach()
    outgrow.grow(model, X, outgrow.Widen(kind="head_dim", by=3), optimizer=optimizer)
    assert (model.size, model.out.in_features) == (7, 21)
    assert model.scale == pytest.approx(7**-0.5 if how == "attribute" else 0.5)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    for _ in range(2):  # keys learn first, then queries
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert all((p.grad != 0).all() for p in model.qkv.parameters() if p.ndim == 2)


def test_queries_make_up_only_for_scales_that_follow_the_size() -> None:
    """Layers of one class: a number in the code stays, and a size follows."""
    ways = ("number", "size", "number", "quotient", "size")
    model = randomise_parameters(nn.Sequential(*(Attention(how) for how in ways)).double())
    before, queries = model(X).detach(), [layer.qkv[0].weight.detach().clone() for layer in model]
    outgrow.widen(model, X, kind="head_dim", by=3)
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    for how, layer, old in zip(ways, model, queries, strict=True):
        now = layer.qkv[0].weight.detach().unflatten(0, (3, 7))[:, :4].flatten(0, 1)
        torch.testing.assert_close(now, old if how in ("number", "quotient") else old * math.sqrt(7 / 4))


def test_a_number_that_the_size_explains_only_by_chance_stays() -> None:
    """0.25 = 4^(−1) is a temperature here, beside the 1/√4 that the kernel computes."""

    class Warm(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for layer in self.qkv)
            y = (q @ k.mT / math.sqrt(self.size) * 0.25).softmax(-1) @ v
            return x + self.out(y.transpose(1, 2).flatten(2))

    model = randomise_parameters(Warm("size").double())
    before = model(X).detach()
    outgrow.widen(model, X, kind="head_dim", by=3)
    assert model.size == 7
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)


def test_a_norm_over_the_features_is_refused_with_the_model_unchanged() -> None:
    model = Attention("kernel", norm=True).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError):
        outgrow.grow(model, X, outgrow.Widen(kind="head_dim", by=3))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class NormedAttention(nn.Module):
    """Rotary attention with 3 heads of 4 features and RMS norms over queries and keys; shared: one norm for both."""

    def __init__(self, shared: bool = False, rotary: bool = True) -> None:
        super().__init__()
        self.size, self.rotary = 4, rotary
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))
        self.q_norm = nn.RMSNorm(4)
        self.k_norm = self.q_norm if shared else nn.RMSNorm(4)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.01]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.frequencies
            cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
            q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin for part in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_a_norm_over_rotary_features_keeps_its_statistics_and_new_features_learn() -> None:
    model = randomise_parameters(NormedAttention().double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(X).detach()
    outgrow.grow(model, X, outgrow.Widen(kind="head_dim", factor=2), optimizer=optimizer)
    assert model.k_norm.weight[1::2].eq(0).all()
    torch.testing.assert_close(model(X), before, rtol=1e-12, atol=1e-12)
    for _ in range(2):  # first γ of keys, then the rest
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert model.k_norm.weight[1::2].ne(0).all()
    assert all((p.grad != 0).all() for p in (model.q.weight, model.k.weight, model.q_norm.weight))


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"shared": True}, "share the γ of their norm"), ({"rotary": False}, "multiplied and summed over it")],
)
def test_norms_that_can_not_cancel_new_features_are_refused(options: dict[str, bool], reason: str) -> None:
    model = NormedAttention(**options).double()
    with pytest.raises(outgrow.GrowthError, match=reason):
        outgrow.grow(model, X, outgrow.Widen(kind="head_dim", factor=2))


@pytest.mark.parametrize(
    ("name", "requests", "says"),
    [
        ("vit", [("head_dim", {"by": 2})], {"head_dim": 6}),
        ("t5", [("head_dim", {"by": 2})], {"d_kv": 6}),
        ("gpt2", [("head_dim", {"factor": 2}), ("width", {"factor": 2})], {"n_embd": 32, "n_head": 4}),
    ],
)
def test_a_library_loads_larger_heads(name: str, requests: list[Any], says: dict[str, int], tmp_path: Path) -> None:
    family = BY_NAME[name]
    model: Any = randomise_parameters(family.build().double()).eval()
    example = {k: v.double() if v.is_floating_point() else v for k, v in family.example().items()}
    before = model(**example).logits
    outgrow.grow(model, example, *(outgrow.Widen(kind=kind, **size) for kind, size in requests))
    assert {field: getattr(model.config, field) for field in says} == says
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    for grown in (model, again):
        torch.testing.assert_close(grown(**example).logits, before, rtol=1e-6, atol=1e-6)
