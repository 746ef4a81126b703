"""Measurements of the comparison on grown copies, checked by brute force: draws, training, masks, and trying all sizes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.comparing_places import METHODS, WRITERS, batch, mlp, stage
from tests.helpers.random_weights import randomise


def new_values(model: nn.Module, grow: Callable[[nn.Module, int], None], seed: int) -> np.ndarray[Any, Any]:
    """All parameters of a grown copy that the model does not have, in order."""
    grown = copy.deepcopy(model)
    grow(grown, seed)
    old = dict(model.named_parameters())
    parts = []
    for name, parameter in grown.named_parameters():
        new = np.ones(parameter.shape, dtype=bool)
        if name in old and len(old[name].shape) == parameter.ndim:
            new[tuple(slice(size) for size in old[name].shape)] = False  # these models' new units come last
        parts.append(parameter.detach().double().numpy()[new])
    return np.concatenate(parts)


def dimension(draw: Callable[[int], np.ndarray[Any, Any]]) -> tuple[int, int]:
    """The dimension of the space of drawn values, and their number.

    Draws go on until two of them, all random, have added no dimension.
    """
    first, draws = draw(0), []
    for seed in itertools.count(1):
        draws.append(draw(seed) - first)
        rank = int(np.linalg.matrix_rank(np.stack(draws), tol=1e-7))
        if len(draws) == rank + 2:
            return rank, first.size
    raise AssertionError


class Loop(nn.Module):
    """A layer from the stream to the stream: its new rows cross its new columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(1, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + torch.tanh(self.body(x)))


PLACES: dict[str, tuple[Callable[[], nn.Module], str, Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), "0", batch(4, 3)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 2)), "0", batch(4, 2)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), nn.Tanh(), nn.Conv2d(2, 1, 2)),
        "0",
        batch(2, 1, 5, 5),
    ),
    "stream to stream": (Loop, "stem", batch(4, 1)),
}


@functools.cache
def compared(place: str) -> tuple[nn.Module, outgrow.Comparison]:
    """A model and the comparison of all methods at its place."""
    make, where, x = PLACES[place]
    model = make()
    randomise(model, torch.Generator().manual_seed(3))
    return model, outgrow.compare(model, x, where)


DRAWN = [
    pytest.param(
        place,
        method,
        marks=[] if method == "r2r" or place in ("linear", "stream to stream") else [pytest.mark.exhaustive],
    )
    for place in PLACES
    for method in ("r2r", "netmorph", WRITERS)
]


@pytest.mark.parametrize(("place", "method"), DRAWN)
def test_degrees_of_freedom_are_the_dimension_of_what_can_be_drawn(place: str, method: str) -> None:
    model, comparison = compared(place)
    column, (_, where, x) = comparison.widen[method], PLACES[place]

    def grow(grown: nn.Module, seed: int) -> None:
        outgrow.widen(grown, x, where, by=2, method=METHODS[method], seed=seed, check=False)

    assert (column.free, column.new) == dimension(lambda seed: new_values(model, grow, seed))


def test_degrees_of_freedom_of_a_new_residual_block() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), batch(4, 2)
    column = outgrow.compare(model, x, "1").deepen["r2r"]

    def new(seed: int) -> np.ndarray[Any, Any]:
        grown = copy.deepcopy(model)
        (block,) = outgrow.deepen(grown, x, "1", method="r2r", seed=seed, check=False).plan.new_blocks
        return np.concatenate([p.detach().double().numpy().ravel() for p in grown.get_submodule(block).parameters()])

    assert (column.free, column.new) == dimension(new)


def test_degrees_of_freedom_of_a_split_layer() -> None:
    """An orthogonal matrix Q moves freely along the kernel of the derivative of Qᵀ Q."""
    model, x = mlp(nn.ReLU(), hidden=5).double(), batch(4, 3).double()
    column = outgrow.compare(model, x, "0").deepen["netmorph"]
    grown = copy.deepcopy(model)
    (block,) = outgrow.deepen(grown, x, "0", method="netmorph").plan.new_blocks
    weight = next(iter(grown.get_submodule(block).parameters())).detach()
    assert weight.shape == (5, 5)
    slopes = torch.autograd.functional.jacobian(lambda q: q.T @ q, weight).reshape(25, 25)
    assert column.free == 25 - int(torch.linalg.matrix_rank(slopes))
    assert column.new == 25 + 5


BETWEEN = {
    "tanh": nn.Tanh(),
    "relu": nn.ReLU(),
    "sigmoid": nn.Sigmoid(),
    "dropout": nn.Sequential(nn.Tanh(), nn.Dropout(0.5)),
}


@functools.cache
def compared_across(between: str) -> outgrow.Comparison:
    return outgrow.compare(mlp(BETWEEN[between]).double(), batch(64, 3).double(), "0")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("between", ["tanh", "relu", "sigmoid"])
def test_noise_is_needed_where_training_keeps_new_units_equal(method: str, between: str) -> None:
    """Train a grown copy, and compare the rows of its new units."""
    model, x = mlp(BETWEEN[between]).double(), batch(64, 3).double()
    column = compared_across(between).widen[method]
    outgrow.widen(model, x, "0", by=24, method=METHODS[method])
    before = model[0].weight.detach().clone(), model[2].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = batch(64, 2).double()
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    moved = not torch.equal(model[0].weight[6:], before[0][6:]) or not torch.equal(model[2].weight[:, 6:], before[1][:, 6:])
    rows = model[0].weight.detach()
    alive = [unit for unit in range(6, 30) if not torch.equal(rows[unit], before[0][unit])]
    equal = any(torch.allclose(rows[one], rows[other], atol=1e-12) for one in alive for other in range(30) if one != other)
    assert (column.parting == "get no gradient") == (not moved)
    if moved:
        assert column.noise == equal


def test_units_written_as_zeros_are_dead_behind_a_relu() -> None:
    """The slope of torch's ReLU at zero is zero: no gradient reaches rows of zeros, nor columns that read zeros."""
    dead = {name: outgrow.compare(mlp(act), batch(16, 3), "0").widen[WRITERS] for name, act in
            {"relu": nn.ReLU(), "gelu": nn.GELU()}.items()}  # fmt: skip
    assert dead["relu"].parting == "get no gradient"
    assert dead["relu"].noise is None
    assert dead["gelu"].noise is False


@pytest.mark.parametrize(
    ("model", "where", "x"),
    [
        (mlp(nn.ReLU(), 4), "0", batch(5, 3)),
        (mlp(nn.LayerNorm(4), 4), "0", batch(5, 3)),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 1, 1)), "0", batch(2, 1, 4, 4)),
    ],
    ids=["any", "whole copies", "groups"],
)
def test_counts_of_new_channels_are_those_that_can_be_added(model: nn.Module, where: str, x: Tensor) -> None:
    for method, column in outgrow.compare(model, x, where).widen.items():
        if column.refused:
            continue
        possible = []
        for by in range(1, 7):
            try:
                outgrow.widen(copy.deepcopy(model), x, where, by=by, method=METHODS[method], check=False)
                possible.append(by)
            except outgrow.GrowthError:
                pass
        shown = column.amount.partition(":")[0]
        every = {"any": 1, "even": 2}.get(shown) or int(shown.removeprefix("multiples of "))
        assert possible == list(range(every, 7, every)), method


def test_existing_parameters_that_change_are_named() -> None:
    model, x = stage(), batch(4, 2, 6, 6)
    for method, column in outgrow.compare(model, x, "stem").widen.items():
        grown = copy.deepcopy(model)
        outgrow.widen(grown, x, "stem", by=2, method=METHODS[method])
        now = dict(grown.named_parameters())
        other = [n for n, p in model.named_parameters() if not torch.equal(now[n][tuple(slice(s) for s in p.shape)], p)]
        assert sorted(column.changed) == sorted(other), method
        assert (column.changed != ()) == (method == "net2net"), method


def test_norms_that_are_corrected_are_named_with_their_epsilon() -> None:
    column = outgrow.compare(mlp(nn.RMSNorm(6, eps=1e-5)), batch(8, 3), "0").widen[WRITERS]
    assert set(column.changed) == {"1.weight", "1.eps"}
    assert column.preserving == "yes"
    assert "corrected" in column.instead
    column = outgrow.compare(mlp(nn.ReLU()), batch(8, 3), "0").deepen["netmorph"]
    assert set(column.changed) == {"0.weight", "0.bias"}


@torch.no_grad()
def without_its_last_unit(model: nn.Sequential, x: Tensor) -> float:
    """How far the outputs move if a mask removes the last hidden unit."""
    hidden = model[1](model[0](x))
    mask = torch.ones(hidden.shape[1], dtype=hidden.dtype)
    mask[-1] = 0.0
    return float((model[2](hidden * mask) - model[2](hidden)).abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_dropout_leaves_pairs_and_copies_exact_in_expectation_only(method: str) -> None:
    model, x = mlp(BETWEEN["dropout"]).double(), batch(8, 3).double()
    column = compared_across("dropout").widen[method]
    grown = copy.deepcopy(model).eval()
    outgrow.widen(grown, x, "0", by=2, method=METHODS[method])
    moves = without_its_last_unit(grown, x) > 1e-5
    assert column.preserving == ("in expectation" if moves else "yes")
    assert column.chance == ("1.1" if moves else "")
    assert moves == (method in ("r2r", "net2net"))


class Samples(nn.Module):
    """Drops whole samples, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


@pytest.mark.parametrize("between", [nn.Dropout(0.0), Samples()], ids=["never", "whole samples"])
def test_chance_that_treats_units_alike_does_no_harm(between: nn.Module) -> None:
    model = mlp(nn.Sequential(nn.Tanh(), between))
    assert outgrow.compare(model, batch(8, 3), "0").widen["r2r"].preserving == "yes"
