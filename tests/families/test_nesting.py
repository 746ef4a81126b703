"""Growths that change existing values are refused, with the reason and a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError
from tests.helpers.nested_sizes import same, state_of


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


CASES = {
    "copies": (plain, outgrow.Widen("0", to=12, method="net2net"), r"2\.weight: copies of units .*\n.*method='r2r'"),
    "means": (normed, outgrow.Widen("0", to=12), r"1\.weight: a wider stream under norms needs.*0\.8165\n.*kind='mlp'"),
    "fading units": (plain, outgrow.Widen("0", to=12, fade=10), r"2\.weight: it fades in"),
    "a fading block": (plain, outgrow.Deepen("1", fade=10), r"it fades in with the steps of an optimizer\n.*leave fade= out"),
    "a split layer": (plain, outgrow.Deepen("0", method="netmorph"), r"0\.weight.*: a layer that is split in two"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_growth_that_changes_existing_values_is_refused(case: str) -> None:
    build, transform, reason = CASES[case]
    model: Any = build()
    before, text = state_of(model), str(model)
    with pytest.raises(MethodError, match=reason):
        outgrow.Family(model, torch.randn(3, 4), transform)
    assert same(before, state_of(model))
    assert str(model) == text
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_is_fading_is_refused() -> None:
    model, x = plain(), torch.randn(3, 4)
    outgrow.widen(model, x, "0", to=12, fade=5)
    with pytest.raises(MethodError, match="wait until it has ended"):
        outgrow.Family(model, x, outgrow.Widen("0", to=16))


class Attention(nn.Module):
    """Attention with separate queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.heads = 2

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return x + self.o(mixed)


def test_larger_heads_are_refused_and_more_heads_are_not() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), Attention(), nn.Linear(8, 2)), torch.randn(2, 5, 4)
    before, expected = state_of(model), model(x)
    with pytest.raises(MethodError, match=r"1\.q\.weight.*larger heads need existing queries times 1\.2.*\n.*kind='heads'"):
        outgrow.Family(model, x, outgrow.Widen(kind="head_dim", by=2))
    assert same(before, state_of(model))
    family = outgrow.Family(model, x, outgrow.Widen(kind="heads", by=2))
    torch.testing.assert_close([member(x) for member in family], [expected, expected])


def test_a_branch_is_skipped_by_the_smaller_member() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    expected = model(x)
    family = outgrow.Family(model, x, outgrow.Branch("2"))
    torch.testing.assert_close([member(x) for member in family], [expected, expected])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if name.startswith(("0", "2.0", "4")) else 2).add_(0.1 * ("2.1" in name))
    torch.testing.assert_close(family[0](x), expected)
    assert not torch.allclose(family[1](x), expected)


def test_drawn_units_can_be_nested() -> None:
    """Random padding changes what the larger network computes, but not the smaller one."""
    model, x = plain(), torch.randn(3, 4)
    expected = model(x)
    family = outgrow.Family(model, x, outgrow.Widen("0", to=12, method="random"))
    torch.testing.assert_close(family[0](x), expected)
    assert not torch.allclose(family[1](x), expected)
