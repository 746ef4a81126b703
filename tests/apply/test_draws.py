"""Draws of large tensors: uniform, the same in any part, and scaled by the standard deviation of the old values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import outgrow
from outgrow.apply.deviations import PIECE, deviation_of_parts, deviations
from outgrow.apply.draws import BLOCK, MANY, Draws, fill_in_blocks


def test_blocks_are_uniform_and_independent_of_each_other() -> None:
    values = torch.empty(8, BLOCK)
    fill_in_blocks(values, 0.5, seed=7)
    assert float(values.abs().max()) <= 0.5
    assert abs(float(values.double().mean())) < 1e-3
    assert abs(float(values.double().std()) - 0.5 / math.sqrt(3)) < 1e-3
    quarters = torch.histc(values, 64, -0.5, 0.5) / values.numel()
    assert float((quarters - 1 / 64).abs().max()) < 1e-3
    correlations = torch.corrcoef(torch.cat([values, values.roll(1, 1)])) - torch.eye(16)
    assert float(correlations.abs().max()) < 0.01


@pytest.mark.parametrize("shape", [(2048, 1024), (3, MANY), (1024, 700, 3)])
def test_any_rows_are_those_of_the_whole(shape: tuple[int, ...]) -> None:
    whole = torch.empty(shape)
    fill_in_blocks(whole, 2.0, seed=3)
    apart = torch.empty((shape[0], 2 * shape[1], *shape[2:]))[:, : shape[1]]  # memory with gaps
    fill_in_blocks(apart, 2.0, seed=3)
    assert torch.equal(whole, apart)
    draws = Draws(shape, torch.float32, 2.0, 3)
    for first, count in ((shape[0] - 1, 1), (1, 2), (0, 1)):
        assert torch.equal(draws.rows(first, count), whole[first : first + count])


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_deviations_do_not_depend_on_the_parts(mean: float) -> None:
    values = torch.randn(2**20 + 1234, generator=torch.Generator().manual_seed(0)) * 0.1 + mean
    expected = float(values.double().std(correction=0))
    found = deviations([values])[0]
    assert abs(found / expected - 1) < 1e-6
    for size in (PIECE - 1, 3 * PIECE, 100_000):
        assert deviation_of_parts(lambda size=size: values.split(size)) == found  # type: ignore[misc]


def test_a_growth_with_many_draws_is_exact_and_has_their_deviation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 2))
    x = torch.randn(2, 1024)
    before, deviation = model(x), float(model[0].weight.detach().std())
    outgrow.widen(model, x, "0", to=3072)
    torch.testing.assert_close(model(x), before)
    new = model[0].weight.detach()[1024:]
    assert torch.equal(new[:1024], new[1024:])
    assert abs(float(new.std()) / deviation - 1) < 1e-2
