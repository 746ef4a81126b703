"""A report names the modules whose own code branches on sizes, since the example takes only one branch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outgrow

X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.enter, self.inner, self.out = nn.Linear(4, 8), KINDS[kind](), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(torch.relu(self.enter(x))))


class ByBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] < 4 else x / x.norm(dim=-1, keepdim=True)


class ByVariable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        batch, _ = x.size()
        if batch >= 4:
            x = x / x.norm(dim=-1, keepdim=True)
        return x * 2


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:
            raise ValueError("too many samples")
        assert x.ndim == 2
        return x.reshape(x.shape[0], -1) * 2


class ByFlag(nn.Module):
    flag = True

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if self.flag else 3)


KINDS = {"by batch": ByBatch, "by variable": ByVariable, "raises": Raises, "by flag": ByFlag}


@pytest.mark.parametrize("kind", KINDS)
def test_branches_on_sizes_are_reported_with_the_module(kind: str) -> None:
    model = Net(kind)
    many = torch.randn(9, 4)
    with torch.no_grad():
        before = model(many)
    report = str(outgrow.widen(model, X, "enter", by=2, method="r2r"))
    found = "the example decides what runs: the code of inner branches on sizes" in report
    with torch.no_grad():
        changed = (model(many) - before).abs().max() > 1e-3
    assert found == bool(changed) == kind.startswith("by ") * (kind != "by flag")
