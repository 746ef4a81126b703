"""`outgrow.volumes` lists for each volume exactly the methods by which `outgrow.widen` grows it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import assert_same_function, shake

METHODS = ("r2r", "net2net", "netmorph", "mean")


class Norm(nn.Module):
    """A norm over the last axis, whose ε is in an attribute or only in the code."""

    def __init__(self, kind: str, kept: bool) -> None:
        super().__init__()
        self.kind, self.gain = kind, nn.Parameter(torch.ones(8))
        if kept:
            self.eps = 0.1 if kind == "layer" else 0.2

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (x.shape[-1],), self.gain, None, getattr(self, "eps", 0.1))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(self, "eps", 0.2)) * self.gain


class Block(nn.Module):
    def __init__(self, kind: str, kept: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(kind, kept), nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("blocks", [1, 6])
@pytest.mark.parametrize(("kept", "curved"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_methods_that_need_another_epsilon_are_listed_if_it_can_change_or_writers_can_pay(
    kind: str, kept: bool, curved: bool, blocks: int
) -> None:
    """In a short stack, and in one whose equal blocks are analysed once. curved: a nonlinear function reads the stream too."""
    torch.manual_seed(0)
    stack = [Block(kind, kept) for _ in range(blocks)]
    end = nn.Sequential(nn.Softplus(), nn.Linear(8, 2)) if curved else nn.Linear(8, 2)
    model, x = shake(nn.Sequential(nn.Linear(3, 8), *stack, end).double()), torch.randn(5, 3, dtype=torch.float64)
    stream, *_ = outgrow.volumes(model, x)
    assert stream.name == "0"
    accepted = []
    for method in METHODS:
        grown = copy.deepcopy(model)
        try:
            outgrow.widen(grown, x, "0", factor=2, method=method)
        except outgrow.GrowthError:
            continue
        assert_same_function(model, grown, x)
        accepted.append(method)
    assert tuple(method for method in METHODS if method in stream.methods) == tuple(accepted)
    assert (("mean" if kind == "layer" else "netmorph") in accepted) == (kept or not curved)
    assert kept or not curved or "self.eps = " in stream.reason
