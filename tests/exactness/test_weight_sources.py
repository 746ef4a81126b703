"""Weights that are computed from stored tensors: shifted, transformed, normalised, masked, or sums of several tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import outgrow
from outgrow.errors import MethodError
from tests.helpers.judging import assert_same_function, distance, shake

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class RootMeanSquare(nn.Module):
    """An RMS norm whose weight is used as f(w)."""

    def __init__(self, size: int, f: Any) -> None:
        super().__init__()
        self.w, self.f = nn.Parameter(torch.zeros(size)), f

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.f(self.w)

    eps = 1e-6


def normed(f: Any) -> nn.Module:
    norm = RootMeanSquare(8, f)
    norm.eps = 1e-6
    return shake(nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3)).double())


@pytest.mark.parametrize("f", [lambda w: w, lambda w: 1 + w, lambda w: 0.5 * (w - 2), lambda w: (1 + w.float()).to(w)])
def test_a_norm_whose_weight_is_shifted_takes_up_the_scale(f: Any) -> None:
    model = normed(f)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, X, "0", factor=1.5)
    assert growth.plan.changes[0].method == "netmorph(zero='writers')"
    assert distance(old(X).detach(), model(X).detach()) < 1e-6
    data = torch.randn(9, 5, dtype=torch.float64)
    assert distance(old(data).detach(), model(data).detach()) < 1e-6


@pytest.mark.parametrize("f", [torch.exp, torch.square, nn.functional.softplus, lambda w: 1 + 2 * w])
def test_a_norm_whose_weight_is_bent_leaves_the_scale_to_the_layer_behind_it(f: Any) -> None:
    model = normed(f)
    old = copy.deepcopy(model)
    outgrow.widen(model, X, "0", factor=1.5)
    assert torch.equal(model[1].w[:8], old[1].w)
    data = torch.randn(9, 5, dtype=torch.float64)
    assert distance(old(data).detach(), model(data).detach()) < 1e-6


class Scaled(nn.Module):
    """A sigmoid, which is not zero at zero, scaled per unit before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.rand(8) + 0.5), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.sigmoid(x) * self.scale)


def test_a_scale_is_not_taken_for_zero_where_writers_are() -> None:
    model = shake(nn.Sequential(nn.Linear(5, 8), Scaled(), nn.Linear(8, 3)).double())
    with pytest.raises(MethodError, match="zeros"):
        outgrow.widen(model, X, "0", factor=1.5, method=outgrow.NetMorph(zero="writers"))
    old = copy.deepcopy(model)
    outgrow.widen(model, X, "0", factor=2)
    assert_same_function(old, model, [X])


def test_shifted_weights_keep_their_moments_where_the_gradient_is() -> None:
    """Moments are scaled as gradients are: a gradient after the growth matches its scaled moment."""
    model = normed(lambda w: 1 + w)
    target = torch.randn(6, 3, dtype=torch.float64)
    (model(X) - target).square().mean().backward()
    outgrow.widen(model, X, "0", factor=1.5)
    carried = model[1].w.grad[:8].clone()
    model.zero_grad()
    (model(X) - target).square().mean().backward()
    assert distance(carried, model[1].w.grad[:8]) < 1e-10


class Bend(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return nn.functional.softplus(w)


PARAMETRIZED = {
    "spectral": parametrizations.spectral_norm,
    "whole norm": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "softplus": lambda layer: parametrize.register_parametrization(layer, "weight", Bend()),
    "weight norm": parametrizations.weight_norm,
}


@pytest.mark.parametrize("name", PARAMETRIZED)
def test_weights_that_are_not_used_as_they_are_stored(name: str) -> None:
    """Volumes that such a weight reads are left out with a reason; all others grow, and outputs stay the same."""
    layers = [nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)]
    PARAMETRIZED[name](layers[2])
    model = nn.Sequential(*layers).double()
    for _ in range(20):  # the power iteration of the spectral norm
        model(X)
    model.eval()
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, X, factor=2, check=False)
    grown = {change.volume for change in growth.plan.changes}
    assert "4" in grown
    assert "0" in ({skip.volume for skip in growth.skipped} if name == "softplus" else grown)  # by zero columns
    assert distance(old(X).detach(), model(X).detach()) < 1e-12
    if name == "weight norm":
        assert "2" in grown


class Merged(nn.Module):
    """A low-rank adapter, added to the weight before it is used, and a mask over it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.rand(6, 8))
        self.a, self.b = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask + self.b @ self.a)


@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph"])
def test_weights_made_of_several_tensors(method: str) -> None:
    model = shake(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Merged(), nn.Linear(6, 3)).double())
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, X, factor=2, method=method)
    assert {"0", "2"} <= {change.volume for change in growth.plan.changes}
    assert_same_function(old, model, [X, X[:2]])


class Vocoder(nn.Module):
    """Weight normalisation as HiFi-GAN uses it: upsampling, residual blocks, and a last convolution; or the older hooks."""

    def __init__(self, hooks: bool) -> None:
        super().__init__()
        normed = nn.utils.weight_norm if hooks else parametrizations.weight_norm
        self.first, self.up = normed(nn.Conv1d(5, 6, 3)), normed(nn.ConvTranspose1d(6, 4, 4, 2))
        self.inner, self.outer, self.last = (normed(nn.Conv1d(*size, 3, padding=1)) for size in ((4, 7), (7, 4), (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(nn.functional.leaky_relu(self.first(x)))
        return self.last(x + self.outer(nn.functional.leaky_relu(self.inner(x))))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("hooks", [False, True])
def test_a_weight_norm_reads_new_units_by_zero_columns(hooks: bool) -> None:
    x, fresh = (torch.randn(2, 5, 9, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        model = shake(Vocoder(hooks).double())
    want = model(fresh)
    volumes = {volume.name: volume for volume in outgrow.volumes(model, x)}
    assert volumes["inner"].methods == ("netmorph",)
    outgrow.widen(model, x, "inner", by=4)
    assert distance(want.detach(), model(fresh).detach()) < 1e-12
    for name in ("first", "up"):  # of a transposed convolution, each column has its own norm, and zeros would divide by zero
        with pytest.raises(outgrow.GrowthError, match=r"aten\.norm"):
            outgrow.widen(model, x, name, by=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(fresh).square().mean().backward()
        optimizer.step()
    assert all(bool(parameter.grad.ne(0).all()) for name, parameter in model.named_parameters() if parameter.ndim == 3)
