"""Bilinear layers, distances, complex rotary encodings and triangular masks: exact growth, or the reason why not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from outgrow.model import reference_operators
from outgrow.model.composed_operators import distances, distances_within, trilinear
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons
from tests.helpers.judging import assert_learns, assert_same_function

aten = torch.ops.aten


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


class Bilinear(nn.Module):
    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.twice = nn.Linear(5, 6), nn.Linear(5, 7), twice
        self.both, self.out = nn.Bilinear(6, 6 if twice else 7, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        left = self.left(x).tanh()
        return self.out(self.both(left, left if self.twice else self.right(x).tanh()).relu())


class RadialBasis(nn.Module):
    """exp(−s²·‖x − c‖²) for centres c."""

    def __init__(self, p: float = 2.0, mode: str = "use_mm_for_euclid_dist_if_necessary") -> None:
        super().__init__()
        self.lift, self.centres, self.scale = nn.Linear(5, 6), nn.Parameter(torch.randn(9, 6)), nn.Parameter(torch.ones(9))
        self.out, self.p, self.mode = nn.Linear(9, 3), p, mode

    def forward(self, x: Tensor) -> Tensor:
        far = torch.cdist(self.lift(x), self.centres, p=self.p, compute_mode=self.mode)
        return self.out(torch.exp(-((far * self.scale) ** 2) / 10))


class ComplexRotary(nn.Module):
    """Attention of Llama's reference implementation: a mask by triu, and rotations as complex numbers."""

    def __init__(self, table: str, heads: int = 2, size: int = 4) -> None:
        super().__init__()
        self.heads, self.size, self.table = heads, size, table
        self.lift, self.norm = nn.Linear(5, 12), nn.RMSNorm(12, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(12, heads * size, bias=False) for _ in range(3))
        self.o, self.out = nn.Linear(heads * size, 12, bias=False), nn.Linear(12, 3)
        rates = 1.0 / (10000 ** (torch.arange(0, size, 2).double() / size))
        if table == "buffer":
            self.register_buffer("rotations", self.turns(rates, 16))
        elif table == "rates":
            self.register_buffer("rates", rates)

    def turns(self, rates: Tensor, length: int) -> Tensor:
        angles = torch.outer(torch.arange(length, dtype=rates.dtype), rates)
        return torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x: Tensor) -> Tensor:
        if self.table == "buffer":
            turns = self.rotations[: x.shape[1]]
        else:
            rates = self.rates if self.table == "rates" else 10000 ** -(torch.arange(0, self.size, 2).double() / self.size)
            turns = self.turns(rates, x.shape[1])
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.lift(x)
        batch, length, _ = stream.shape
        q, k, v = (layer(self.norm(stream)).view(batch, length, self.heads, -1) for layer in (self.q, self.k, self.v))
        q, k, v = (item.transpose(1, 2) for item in (self.rotate(q), self.rotate(k), v))
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype).triu(1)
        scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.size) + mask, dim=-1)
        return self.out(stream + self.o((scores @ v).transpose(1, 2).reshape(batch, length, -1)))


class LowerScores(nn.Module):
    """Linear attention with a causal mask: scores above the diagonal are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.qkv, self.out = nn.Linear(5, 6), nn.Linear(6, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.lift(x).tanh()).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        scores = (q.exp() @ k.exp().transpose(2, 3)).tril()
        return self.out((scores / scores.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


class MaskedWeight(nn.Module):
    """A layer whose units see only earlier units; the mask is written in one of two ways."""

    def __init__(self, by_ones: bool) -> None:
        super().__init__()
        self.first, self.second, self.out, self.by_ones = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), by_ones

    def forward(self, x: Tensor) -> Tensor:
        weight = self.second.weight
        weight = weight * torch.ones(6, 6, dtype=x.dtype).tril() if self.by_ones else weight.tril()
        return self.out(F.linear(self.first(x).tanh(), weight, self.second.bias).tanh())


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, math.inf])
def test_distances_are_those_of_the_operator(p: float) -> None:
    x, other = drawn(2, 4, 5), drawn(2, 3, 5, seed=1)
    torch.testing.assert_close(distances(x, other, p), aten._cdist_forward(x, other, p, None))
    torch.testing.assert_close(distances(x[0], other[0]), aten._euclidean_dist(x[0], other[0]))
    torch.testing.assert_close(distances_within(x[0], p), aten._pdist_forward(x[0], p))


def test_trilinear_is_that_of_the_operator() -> None:
    x, weight, z = drawn(4, 5), drawn(3, 5, 6, seed=1), drawn(4, 6, seed=2)
    for settings in (([1, 3], [0], [1, 2], [2, 3]), ([1, 3], [0], [1, 2], [2]), ([1, 3], [0], [1, 2], [0, 3])):
        torch.testing.assert_close(trilinear(x, weight, z, *settings), aten._trilinear(x, weight, z, *settings))


def test_a_bilinear_layer_grows_exactly_on_all_sides() -> None:
    model = randomised(Bilinear())
    assert_exact_everywhere(model, drawn(4, 5), drawn(7, 5, seed=1), {"left", "right", "both"})
    grown = copy.deepcopy(model)
    for name in ("left", "right", "both"):
        outgrow.widen(grown, drawn(4, 5), name, factor=2)
    assert (grown.both.in1_features, grown.both.in2_features, grown.both.out_features) == (12, 14, 16)
    assert_same_function(model, grown, [drawn(6, 5, seed=2)])
    assert_learns(grown, drawn(6, 5, seed=3))


def test_one_input_on_both_sides_of_a_bilinear_layer_does_not_grow() -> None:
    model = randomised(Bilinear(twice=True))
    assert set(growable(model, drawn(4, 5))) == {"both"}
    assert reasons(model, drawn(4, 5))["left"] == "the code ties its units along two axes at once"


def test_a_wrong_description_of_an_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(x: Tensor, weight: Tensor, z: Tensor, **settings: Any) -> Tensor:
        return F.linear(x, weight.sum(2)) + z.sum(1, keepdim=True)  # new units of z would count once, whatever their columns

    wrong = reference_operators.Reference("aten::_trilinear", summed)
    monkeypatch.setitem(reference_operators.BUILT_IN, aten._trilinear.default, wrong)
    model = randomised(Bilinear())
    before = copy.deepcopy(model.state_dict())
    for name in ("right", "left"):
        with pytest.raises(outgrow.GrowthError):
            outgrow.widen(model, drawn(4, 5), name, by=2, method=outgrow.NetMorph(zero="readers"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_centres_of_a_radial_basis_grow_exactly(p: float, mode: str) -> None:
    model = randomised(RadialBasis(p, mode))
    names = {"centres", "lift"} if p < 3 else {"centres"}
    assert_exact_everywhere(model, drawn(4, 5), drawn(30, 5, seed=1), names)
    assert "aten.linalg_vector_norm runs over its units" in reasons(model, drawn(4, 5)).get("lift", "") or p < 3


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_new_features_of_a_distance_are_copies_since_zeros_would_not_learn(p: float) -> None:
    model = randomised(RadialBasis(p))
    assert growable(model, drawn(4, 5))["lift"] == ("net2net",)
    with pytest.raises(outgrow.GrowthError, match="at zero is zero, so no gradient would pass it"):
        outgrow.widen(model, drawn(4, 5), "lift", by=2, method="netmorph")
    grown = copy.deepcopy(model)
    outgrow.widen(grown, drawn(4, 5), "lift", by=2, method=outgrow.NetMorph(zero="writers"))  # on explicit request
    grown(drawn(8, 5, seed=2)).square().sum().backward()
    assert not grown.lift.weight.grad[6:].any()
    assert not grown.centres.grad[:, 6:].any()


@pytest.mark.parametrize("table", ["buffer", "rates", "code"])
def test_heads_grow_under_complex_rotations(table: str) -> None:
    model, x = randomised(ComplexRotary(table)), drawn(2, 7, 5)
    heads = next(volume for volume in outgrow.volumes(model, x) if volume.kind == "heads")
    grown = copy.deepcopy(model)
    outgrow.widen(grown, x, heads.name, by=2)
    outgrow.widen(grown, x, "lift", by=4)
    assert (grown.heads, grown.q.weight.shape) == (4, (16, 16))
    assert_same_function(model, grown, [drawn(3, 9, 5, seed=1)])
    features = {volume.name for volume in outgrow.volumes(model, x) if volume.kind == "head_dim" and not volume.growable}
    (name,) = features  # of queries and keys
    with pytest.raises(outgrow.GrowthError, match="can't grow"):
        outgrow.widen(grown, x, name, by=4)


def test_features_under_rotations_made_by_polar_name_the_encoding() -> None:
    found = reasons(randomised(ComplexRotary("rates")), drawn(2, 7, 5)).values()
    assert "its sizes set the frequencies of a position encoding" in found


def test_heads_grow_under_a_triangular_mask() -> None:
    model, x = randomised(LowerScores()), drawn(2, 7, 5)
    (heads,) = (volume for volume in outgrow.volumes(model, x) if volume.kind == "heads")
    for method in heads.methods:
        grown = copy.deepcopy(model)
        outgrow.widen(grown, x, heads.name, by=2, method=method)
        assert_same_function(model, grown, [drawn(3, 9, 5, seed=1)])


@pytest.mark.parametrize(("by_ones", "reason"), [(False, "masks its units by their positions"), (True, "number in its code")])
def test_units_that_a_mask_orders_do_not_grow(by_ones: bool, reason: str) -> None:
    model = randomised(MaskedWeight(by_ones))
    assert not growable(model, drawn(4, 5))
    with pytest.raises(outgrow.GrowthError, match=reason):
        outgrow.widen(model, drawn(4, 5), "first", by=2)


def test_a_rule_of_the_user_takes_the_place_of_a_description() -> None:
    with pytest.raises(outgrow.GrowthError, match=r"of its own: outgrow\.rule"):
        outgrow.rule("aten::_trilinear", like=trilinear)
