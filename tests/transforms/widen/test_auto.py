"""What "auto" chooses: a method with which new units learn, and the requested size where a method reaches it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow


class PostNorm(nn.Module):
    """A stream that is itself the output of a layer norm: only whole copies are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Linear(3, 4), nn.LayerNorm(4)
        self.up, self.down, self.last, self.head = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        return torch.as_tensor(self.head(self.last(x + self.down(torch.tanh(self.up(x))))))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_copies_that_auto_makes_become_different(kind: type[torch.optim.SGD]) -> None:
    torch.manual_seed(0)
    model, x = PostNorm().double(), torch.randn(16, 3, dtype=torch.float64)
    before = model(x)
    (change,) = outgrow.widen(model, x, "stem", factor=2).plan.changes
    assert change.method == "net2net"
    torch.testing.assert_close(model(x), before)
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    for weight in (model.stem.weight, model.down.weight):
        distances = torch.cdist(weight, weight) + torch.eye(8)
        assert distances.min() > 1e-4 * weight.std()


@pytest.mark.parametrize(
    ("size", "factor", "new", "method"), [(3, 2, 6, "netmorph"), (10, 1.5, 15, "netmorph"), (30, 1.1, 33, "netmorph")]
)
def test_a_factor_reaches_the_size_it_requests(size: int, factor: float, new: int, method: str) -> None:
    model = nn.Sequential(nn.Linear(3, size), nn.ReLU(), nn.Linear(size, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    before = copy.deepcopy(model)(x)
    (change,) = outgrow.widen(model, x, "0", factor=factor).plan.changes
    assert (change.new, change.method) == (new, method)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize(("size", "factor", "new"), [(8, 1.5, 12), (5, 1.5, 7), (64, 1.3, 84), (3, 1.1, 3)])
def test_other_factors_are_rounded_to_pairs(size: int, factor: float, new: int) -> None:
    model = nn.Sequential(nn.Linear(3, size), nn.ReLU(), nn.Linear(size, 2))
    if new == size:
        with pytest.raises(outgrow.GrowthError, match="nearest possible size"):
            outgrow.widen(model, torch.randn(4, 3), "0", factor=factor)
        return
    (change,) = outgrow.widen(model, torch.randn(4, 3), "0", factor=factor).plan.changes
    assert (change.new, change.method) == (new, "r2r")


def test_a_requested_method_rounds_a_factor() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    (change,) = outgrow.widen(model, torch.randn(4, 3), "0", factor=2, method="r2r").plan.changes
    assert change.new == 7
