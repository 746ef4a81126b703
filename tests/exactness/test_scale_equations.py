"""Streams that grow without a change of ε: the tensors that write them are rescaled, and norms compensate that.

The ε of these norms is in no attribute, so it can't change; it is large, so that a wrong scale shows in the outputs.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from outgrow.analysis.exponents import Exponent
from outgrow.analysis.unit_states import Ratio, Refused
from outgrow.errors import MethodError
from outgrow.exactness.scale_equations import Payment, ScaleEquations, simple_power
from outgrow.growth_plan.plan import Rescaling
from tests.helpers.judging import assert_same_function, distance
from tests.helpers.random_weights import randomise_parameters

WIDTH, TOKENS = 8, 11
IDS, OTHER_IDS = (torch.randint(TOKENS, (3, 5), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


class Norm(nn.Module):
    """A norm with an ε of 0.3 in its code: a layer norm, an RMS norm, one with a gain of 1 + w, or one without a gain."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind != "bare":
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if kind == "layer":
            self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.gain, self.shift, 0.3)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.3)
        return y if self.kind == "bare" else y * (1 + self.gain if self.kind == "offset" else self.gain)


class Block(nn.Module):
    def __init__(self, kind: str, post: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(kind), nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.after = Norm("rms") if post else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.down(torch.tanh(self.up(self.norm(x)))))


class Language(nn.Module):
    """Tokens and positions, two blocks, a norm and a head, which may be the embedding; it may also read what no norm reads."""

    def __init__(self, kind: str = "rms", tied: bool = False, post: bool = False, bare: bool = False, scale: float = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.zeros(5, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(kind, post), Block(kind, post)), Norm(kind)
        self.head = nn.Linear(WIDTH, TOKENS)
        if tied:
            self.head.weight = self.tokens.weight
        self.bare = nn.Linear(WIDTH, TOKENS) if bare else None
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.scale * self.tokens(ids) + self.positions)
        logits: Tensor = self.head(self.norm(x))
        return logits if self.bare is None else logits + self.bare(x)


CASES = {
    "rms": Language(),
    "layer": Language("layer"),
    "gain of 1 + w": Language("offset"),
    "no gain: readers are rescaled": Language("bare"),
    "tied": Language(tied=True),
    "tied, layer norm with a shift": Language("layer", tied=True),
    "tied, gain of 1 + w": Language("offset", tied=True),
    "norms at the end of branches": Language(post=True),
    "read without a norm": Language(bare=True),
    "tied, norms at the end of branches, scaled embeddings": Language("offset", tied=True, post=True, scale=2.5),
}


def rescaled(growth: outgrow.Growth) -> dict[str, float]:
    return {edit.tensor: edit.factor**2 for edit in growth.plan.edits if isinstance(edit, Rescaling)}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_grows_without_a_change_of_epsilon(case: str) -> None:
    model = randomise_parameters(copy.deepcopy(CASES[case]).double())
    grown = copy.deepcopy(model)
    growth = outgrow.grow(grown, IDS, outgrow.Widen(kind="width", factor=1.5))
    assert grown.tokens.weight.shape == (TOKENS, 12)
    assert_same_function(model, grown, OTHER_IDS)
    with torch.no_grad():
        assert distance(model(OTHER_IDS), grown(OTHER_IDS)) < 1e-13
    factors = rescaled(growth)
    assert factors["tokens.weight"] == pytest.approx(1.5)
    assert "blocks.0.after.gain" not in factors
    if model.head.weight is model.tokens.weight:
        assert factors["norm.gain"] == pytest.approx(1.5**-2)  # divided by k twice
    assert "rescaled, so that the ε of norms stays: × " in str(growth)


def test_moments_are_those_of_the_rescaled_gradient() -> None:
    """With β₁ = β₂ = 0, Adam's moments are the last gradient and its square; those of the grown model are computed again."""
    model = randomise_parameters(copy.deepcopy(CASES["tied, norms at the end of branches, scaled embeddings"]).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.0, 0.0))
    model(IDS).square().sum().backward()
    optimizer.step()
    outgrow.grow(model, IDS, outgrow.Widen(kind="width", factor=1.5), optimizer=optimizer)
    model.zero_grad()
    model(IDS).square().sum().backward()
    for name, parameter in model.named_parameters():
        state, old = optimizer.state[parameter], tuple(slice(WIDTH if size == 12 else size) for size in parameter.shape)
        assert parameter.grad is not None
        torch.testing.assert_close(state["exp_avg"][old], parameter.grad[old], rtol=1e-9, atol=1e-9, msg=name)
        torch.testing.assert_close(state["exp_avg_sq"][old], parameter.grad[old].square(), rtol=1e-9, atol=1e-9, msg=name)


class Curved(nn.Module):
    """A stream that a nonlinear function reads, besides the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.out, self.curve = nn.Linear(3, WIDTH), Norm("rms"), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.out(self.norm(h)) + self.curve(torch.tanh(h))


def test_a_stream_under_a_nonlinear_function_is_refused_with_both_reasons() -> None:
    model = randomise_parameters(Curved().double())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MethodError, match=r"keeps its ε = 0.3 in no attribute .* if its writers are rescaled instead") as error:
        outgrow.widen(model, torch.randn(4, 3).double(), "enter", factor=1.5, method="netmorph")
    assert "aten.tanh" in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_half_precision_report_says_that_rescaled_values_are_rounded() -> None:
    model = randomise_parameters(copy.deepcopy(CASES["tied"]).double()).bfloat16()
    before = copy.deepcopy(model).float()
    growth = outgrow.grow(model, IDS, outgrow.Widen(kind="width", factor=1.5))
    assert "their values are rounded to bfloat16" in str(growth)
    assert growth.max_error <= growth.tolerance
    with torch.no_grad():
        assert 1e-6 < distance(before(OTHER_IDS), model.float()(OTHER_IDS)) < 0.05


def test_by_a_power_of_two_half_precision_is_exact() -> None:
    model = randomise_parameters(copy.deepcopy(CASES["tied"]).double()).bfloat16()
    before = copy.deepcopy(model).double()
    outgrow.grow(model, IDS, outgrow.Widen(kind="width", factor=4))
    with torch.no_grad():
        assert distance(before(OTHER_IDS), model.double()(OTHER_IDS)) < 1e-13


def test_equations_are_solved_or_refused() -> None:
    equations = ScaleEquations(Payment())
    writer, gain, reader = (equations.tensor(name, 0.0, rank) for rank, name in enumerate(("writer", "gain", "reader")))
    equations.must_be_zero(writer * 2 + 1, "ε")
    equations.must_be_zero(writer + gain + reader, "read")
    found = {rescale.tensor: rescale.exponent for rescale in equations.rescales(Ratio(2, 1))}
    assert {name: float(exponent) for name, exponent in found.items()} == {"writer": -0.5, "gain": 0.5}
    with pytest.raises(Refused, match="no way"):
        equations.must_be_zero(writer + Exponent(simple_power(1, 2, 2) or Exponent().constant), "no way")
    assert simple_power(4.0, 2.0, 0.25) == 0.5
    assert simple_power(4.0, 3.0, 0.25) is None
