"""Norms without weights, softmax and normalisation over features: the next layer compensates the change of scale."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons

X, FRESH = (torch.randn(batch, 5, dtype=DTYPE, generator=torch.Generator().manual_seed(batch)) for batch in (4, 3))


class Behind(nn.Module):
    """Two layers, and an operator between them that mixes features."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.out, self.how = nn.Linear(5, 6), nn.Linear(9 if how == "beside others" else 6, 2), how
        self.norm = nn.LayerNorm(6, elementwise_affine=False) if how == "layer norm" else nn.RMSNorm(6, 1e-3, False)
        if how == "beside others":
            self.beside = nn.Linear(5, 3)
        if how == "softmax, read twice":
            self.second = nn.Linear(6, 2)
        if how == "cosine":
            del self.out

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        match self.how:
            case "softmax":
                return self.out(torch.softmax(h, dim=-1))
            case "softmax, read twice":
                p = torch.softmax(h, dim=-1)
                return self.out(p) + self.second(3 * p)
            case "softmax, read twice by one":
                p = torch.softmax(h, dim=-1)
                return self.out(p).tanh() + F.linear(p, self.out.weight)
            case "softmax and what goes into it":
                return self.out(torch.softmax(h, dim=-1)) + F.linear(h, self.out.weight)
            case "beside others":
                return self.out(torch.cat([torch.softmax(h, dim=-1), self.beside(x)], dim=-1))
            case "log softmax":
                return self.out(torch.log_softmax(h, dim=-1))
            case "normalize":
                return self.out(F.normalize(h, dim=-1))
            case "cosine":
                return F.cosine_similarity(h, self.enter(x.flip(0)), dim=-1)
        return self.out(self.norm(h))


@pytest.mark.parametrize(
    ("how", "methods"),
    [
        ("layer norm", ("net2net", "mean")),
        ("rms norm", ("net2net", "netmorph")),
        ("softmax", ("net2net",)),
        ("softmax, read twice", ("net2net",)),
        ("softmax, read twice by one", ("net2net",)),
        ("normalize", ("net2net", "netmorph")),
        ("cosine", ("net2net",)),
    ],
)
def test_the_next_layer_compensates_the_scale(how: str, methods: tuple[str, ...]) -> None:
    model = randomised(Behind(how))
    assert growable(model, X) == {"enter": methods}
    assert_exact_everywhere(model, X, FRESH, {"enter"})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("softmax and what goes into it", "would compensate the scale of a norm"),
        ("beside others", "combines values whose scales change differently"),
        ("log softmax", "a log_softmax runs over its units"),
    ],
)
def test_it_is_refused_where_no_layer_can_compensate(how: str, why: str) -> None:
    model = randomised(Behind(how))
    assert why in reasons(model, X)["enter"]


def test_moments_follow_a_layer_that_takes_up_a_scale() -> None:
    """Gradients of the grown model are those of the old one, scaled, and Adam's state must be scaled accordingly."""
    model = randomised(Behind("rms norm"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model(X).square().mean().backward()
    optimizer.step()
    grown, carried = copy.deepcopy((model, optimizer))
    outgrow.widen(grown, X, "enter", by=6, method="netmorph", optimizer=carried)
    ratio = grown.out.weight[:, :6] / model.out.weight
    assert torch.allclose(ratio, torch.full_like(ratio, 0.5**0.5))
    moment, before = carried.state[grown.out.weight]["exp_avg"][:, :6], optimizer.state[model.out.weight]["exp_avg"]
    torch.testing.assert_close(moment, before * 2**0.5)


class Tied(nn.Module):
    """An autoencoder that decodes by the transpose of the weight it encodes by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias, self.back = (nn.Parameter(torch.randn(*shape)) for shape in ((6, 5), (6,), (5,)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t(), self.back)


def test_a_tied_autoencoder_grows_by_zeros_alone() -> None:
    model = randomised(Tied())
    assert growable(model, X) == {"weight": ("netmorph",)}
    assert_exact_everywhere(model, X, FRESH, {"weight"})
    with pytest.raises(outgrow.GrowthError, match="both writes and reads it"):
        outgrow.widen(model, X, "weight", by=2, method="r2r")
    outgrow.widen(model, X, "weight", by=2)
    model(X).square().mean().backward()
    assert bool((model.weight.grad[6:] != 0).all())  # new units learn: their bias is not zero
