"""Models that differentiate in their forward pass: forces stay as exact as energies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons

POSITIONS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=DTYPE)
FRESH = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=DTYPE)


class Energy(nn.Module):
    """Returns an energy and its forces, concatenated; `enable`: whether the model enables gradients by itself."""

    def __init__(self, enable: bool) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 1)
        self.enable = enable

    def energy(self, positions: Tensor) -> Tensor:
        return self.last(nn.functional.silu(self.second(self.norm(self.first(positions)))))

    def forward(self, positions: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.enable or torch.is_grad_enabled()):
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions)
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=torch.is_grad_enabled())
        return torch.cat([energy, -gradient], dim=1)


class Differentiable(nn.Module):
    """Enables gradients, since the independent judge runs models without them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.model(*inputs).detach()


@pytest.mark.parametrize("enable", [True, False])
def test_energies_and_forces_are_preserved(enable: bool) -> None:
    model = Differentiable(randomised(Energy(enable)))
    assert_exact_everywhere(model, POSITIONS, FRESH, {"model.first", "model.second"})
    assert growable(model, POSITIONS)["model.second"] == ("r2r", "net2net", "netmorph", "mean")
    assert "r2r" not in growable(model, POSITIONS)["model.first"]  # a layer norm follows


def test_a_model_that_needs_gradients_grows_where_they_are_disabled() -> None:
    model = randomised(Energy(enable=False))
    before = model(POSITIONS)
    with torch.no_grad():
        outgrow.widen(model, POSITIONS, "second", by=2)
    torch.testing.assert_close(model(POSITIONS), before, rtol=1e-12, atol=1e-12)
    assert model.second.weight.grad is None


def test_training_on_forces_continues_after_a_growth() -> None:
    model = randomised(Energy(enable=True))
    optimizer = torch.optim.Adam(model.parameters())
    outgrow.widen(model, POSITIONS, "second", by=2, optimizer=optimizer)
    model(POSITIONS)[:, 1:].square().mean().backward()
    assert bool((model.second.weight.grad[4:] != 0).any())
    optimizer.step()


def test_several_gradients_of_gradients() -> None:
    class Curvature(nn.Module):
        """A physics-informed network: a function of x and its second derivative."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(1, 6), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            y = self.last(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            (curve,) = torch.autograd.grad(outputs=[slope.sum()], inputs=[x], create_graph=True)
            return torch.cat([y, slope, curve], dim=1)

    assert_exact_everywhere(Differentiable(randomised(Curvature())), POSITIONS[:, :1], FRESH[:, :1], {"model.first"})


class OfUnits(nn.Module):
    """Returns the gradient with respect to a hidden layer, whose size is the number of hidden units."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 6), nn.Linear(6, 1), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if self.how == "func":
                return torch.func.grad(lambda y: self.last(torch.tanh(self.first(y))).sum())(x)
            x = x.detach().requires_grad_()
            hidden = torch.tanh(self.first(x))
            if self.how == "backward":
                self.last(hidden).sum().backward()
                return x.grad
            if self.how == "sum":
                return torch.autograd.grad(hidden, x, torch.ones_like(hidden))[0]
            return self.last(torch.autograd.grad(self.last(hidden).sum(), hidden)[0])


def test_gradients_with_respect_to_units_are_refused() -> None:
    assert "with respect to its units" in reasons(OfUnits("units"), torch.randn(2, 3))["first"]
    assert "differentiates its sum over units" in reasons(OfUnits("sum"), torch.randn(2, 3))["first"]
    assert "torch.autograd.grad" in reasons(OfUnits("backward"), torch.randn(2, 3))["first"]


def test_torch_func_is_refused_with_a_way_out() -> None:
    model = OfUnits("func")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(outgrow.GrowthError, match=r"torch\.autograd\.grad"):
        outgrow.widen(model, torch.randn(2, 3), "first", by=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_schnet_of_torch_geometric_keeps_its_forces() -> None:
    library = pytest.importorskip("torch_geometric.nn")

    def every_pair(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.arange(len(positions))
        edges = torch.stack([index.repeat_interleave(len(index)), index.repeat(len(index))])
        edges = edges[:, edges[0] != edges[1]]
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_channels": 6, "num_filters": 8, "num_interactions": 1, "num_gaussians": 5}
            self.net = library.SchNet(**sizes, interaction_graph=every_pair)

        def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
            positions = positions.detach().requires_grad_()
            energy = self.net(kinds, positions)
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
            return torch.cat([energy.expand(len(positions), 1), -gradient], dim=1)

    model = Differentiable(randomised(Forces()))
    kinds = torch.tensor([1, 6, 8, 1])
    names = {name for name in growable(model, (kinds, POSITIONS)) if "distance" not in name}
    assert {"model.net.embedding", "model.net.interactions.0.mlp.2", "model.net.lin1"} <= names
    grown = copy.deepcopy(model)
    outgrow.widen(grown, (kinds, POSITIONS), sorted(names), factor=2)
    for positions in (POSITIONS, FRESH[:4]):
        torch.testing.assert_close(grown(kinds, positions), model(kinds, positions), rtol=1e-11, atol=1e-11)
