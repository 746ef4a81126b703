"""Home-made models with experts, built by the user and filled by names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError, VerifyError


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return out


class Experts(nn.Module):
    """Experts one by one, in a list."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(6, experts), top_k
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.router(x).softmax(-1).topk(self.top_k)
        weights = values.new_zeros(len(x), len(self.experts)).scatter(1, chosen, values / values.sum(-1, keepdim=True))
        return torch.stack([expert(x) * weights[:, [n]] for n, expert in enumerate(self.experts)]).sum(0)


class Stacked(nn.Module):
    """Experts in one tensor, with the weights of a softmax over all of them."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(6, experts, bias=False), top_k
        self.rise, self.fall = (nn.Parameter(torch.randn(experts, *shape)) for shape in ((6, 10), (10, 6)))

    def forward(self, x: Tensor) -> Tensor:
        values, chosen = self.router(x).softmax(-1).topk(self.top_k)
        hidden = torch.einsum("bi,bkih->bkh", x, self.rise[chosen]).relu()
        return torch.einsum("bkh,bkho,bk->bo", hidden, self.fall[chosen], values)


class Net(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.LayerNorm(6)])
        self.mlp, self.head = mlp, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x + self.mlp(x))
        return out


PAIRS = {
    "dense, to a list": (lambda: Mlp(), lambda: Experts(5, 2)),
    "a list": (lambda: Experts(3, 2), lambda: Experts(6, 4)),
    "one tensor": (lambda: Stacked(3, 1), lambda: Stacked(9, 3)),
}


@pytest.mark.parametrize("case", PAIRS)
def test_models_of_any_class_are_filled_by_names(case: str) -> None:
    torch.manual_seed(0)
    old, new = (Net(make()).double() for make in PAIRS[case])
    mlp: nn.Module = new.mlp
    router = copy.deepcopy(mlp.router)
    assert outgrow.upcycle(old, torch.randn(8, 4).double(), into=new) is new
    x = torch.randn(64, 4).double()
    torch.testing.assert_close(new(x), old(x), rtol=1e-12, atol=1e-12)
    assert new.upcycling.exact
    assert "Net → Net" in str(new.upcycling)
    if case.startswith("dense"):
        assert torch.equal(mlp.router.weight, router.weight)


def test_a_model_that_computes_something_else_is_put_back() -> None:
    old, new = Net(Experts(3, 2)), Net(Experts(6, 2))  # twice as many should be chosen
    before = copy.deepcopy(new.state_dict())
    with pytest.raises(VerifyError, match="Net differs from Net"):
        outgrow.upcycle(old, torch.randn(8, 4), into=new)
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    assert not hasattr(new, "upcycling")


def test_tensors_without_a_place_are_refused() -> None:
    old = Net(Experts(3, 2))
    with pytest.raises(MethodError, match=r"mlp\.router\.weight: it has the shape \(4, 6\)"):
        outgrow.upcycle(old, torch.randn(8, 4), into=Net(Experts(4, 2)))
    with pytest.raises(MethodError, match=r"mlp\.experts\.0\.fc1\.weight: no tensor of Net has this name"):
        outgrow.upcycle(old, torch.randn(8, 4), into=Net(Stacked(3, 2)))
    with pytest.raises(MethodError, match="build a new model"):
        outgrow.upcycle(old, torch.randn(8, 4), into=old)
