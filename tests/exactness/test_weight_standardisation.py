"""Weight standardisation, and runs of units that are averaged separately."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow


class StandardConv(nn.Conv2d):
    """A convolution whose rows are standardised in each forward pass, as in NFNets."""

    def __init__(self, into: int, out: int, kernel: int) -> None:
        super().__init__(into, out, kernel, padding=kernel // 2)
        self.gain = nn.Parameter(torch.ones(out, 1, 1, 1))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.weight.shape[0], -1)
        weight = F.batch_norm(rows, None, None, weight=self.gain.view(-1), training=True, eps=self.eps)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, padding=self.padding)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        StandardConv(3, 6, 3), nn.GELU(), StandardConv(6, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 25, 4)
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


@pytest.mark.parametrize("method", ["r2r", "netmorph", "auto"])
def test_standardised_weights_grow_exactly(method: str) -> None:
    model = network()
    before = copy.deepcopy(model)
    growth = outgrow.widen(model, torch.randn(2, 3, 5, 5, dtype=torch.float64), "*", factor=1.5, method=method)
    fresh = torch.randn(5, 3, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(model(fresh), before(fresh), rtol=1e-12, atol=1e-12)
    assert [change.new for change in growth.plan.changes] == ([10, 12] if method not in ("auto", "netmorph") else [9, 12])


def test_pairs_leave_mean_and_variance_of_every_row_as_they_are() -> None:
    model = network()
    old = model[2].weight.detach().clone()
    gain, eps = model[2].gain.detach().clone(), model[2].eps
    outgrow.widen(model, torch.randn(2, 3, 5, 5, dtype=torch.float64), "0", by=4, method="r2r")
    new = model[2].weight
    torch.testing.assert_close(new.mean(dim=(1, 2, 3)), old.mean(dim=(1, 2, 3)))
    torch.testing.assert_close(new.var(dim=(1, 2, 3), correction=0), old.var(dim=(1, 2, 3), correction=0))
    assert torch.equal(model[2].gain, gain)
    assert model[2].eps == eps
    assert bool((new[:, 6:8] - new.mean(dim=(1, 2, 3), keepdim=True)).abs().min() > 0)


class Halves(nn.Module):
    """One half of the channels is normalised separately; a grouped convolution ties the halves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.norm = nn.LayerNorm(4)
        self.grouped = nn.Conv2d(8, 6, 1, groups=2)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.stem(x).chunk(2, dim=1)
        one = self.norm(one.movedim(1, -1)).movedim(-1, 1)
        return self.head(self.grouped(torch.cat([other, one], dim=1)).mean(dim=(2, 3)))


def test_each_run_of_units_is_averaged_by_itself() -> None:
    torch.manual_seed(0)
    model = Halves().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    before = copy.deepcopy(model)
    growth = outgrow.widen(model, torch.randn(2, 3, 4, 4, dtype=torch.float64), "stem", by=2)
    assert [change.method for change in growth.plan.changes] == ["mean"]
    fresh = torch.randn(3, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(model(fresh), before(fresh), rtol=1e-12, atol=1e-12)
