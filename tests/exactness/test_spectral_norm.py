"""Spectral norm: a weight is divided by its largest singular value, which a power iteration follows while the model trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, growable, reasons
from tests.helpers.judging import assert_same_function

X, FRESH = (torch.randn(batch, 5, dtype=DTYPE, generator=torch.Generator().manual_seed(batch)) for batch in (4, 3))
KINDS = {"parametrization": nn.utils.parametrizations.spectral_norm, "hook": nn.utils.spectral_norm}


def build(kind: str, *normed: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    for index in normed:
        KINDS[kind](model[index])
    with torch.no_grad():
        for _ in range(3):  # far from the fixed point of the power iteration
            model(X)
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["0", "2"])
def test_units_that_such_a_weight_reads_or_writes_grow_with_zeros_on_its_side(kind: str, name: str) -> None:
    old, new = build(kind, 2), build(kind, 2)
    assert growable(old, X) == {"0": ("netmorph",), "2": ("netmorph",)}
    growth = outgrow.widen(new, X, name, by=4)
    assert growth.plan.changes[0].method == ("netmorph" if name == "0" else "netmorph(zero='writers')")
    assert_same_function(old, new, [X, FRESH], modes=(False,))
    for model in (old, new):
        model.train()
    with torch.no_grad():
        for _ in range(5):  # the power iteration continues as in the ungrown model
            torch.testing.assert_close(new(X), old(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_between_two_such_weights_nothing_is_exact_and_alive(kind: str) -> None:
    found = reasons(build(kind, 0, 2), X)["0"]
    assert "new rows of its weight, unless they are zero" in found
    assert "with zero writers too, new units would never learn" in found


def test_new_units_beside_a_spectral_norm_learn() -> None:
    model = build("parametrization", 2)
    outgrow.widen(model, X, "0", by=2)
    model.train()(X).square().mean().backward()
    assert bool((model[2].parametrizations.weight.original.grad[:, 6:] != 0).all())
