"""Deepening of plain networks: residual blocks, identity layers, layers split in two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError
from tests.helpers.judging import assert_same_function, distance, shake, state_of
from tests.helpers.residual_chain import X


class Branching(nn.Module):
    """No containers anywhere: layers as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.up, self.head = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.act(self.norm(self.conv(x))))).mean((2, 3)))


def plain() -> nn.Module:
    wide = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(
        *wide, nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, 5), nn.ReLU(), nn.Linear(5, 3)
    )


PLAIN = {"sequential": plain, "attributes": Branching}


@pytest.mark.parametrize("name", PLAIN)
def test_every_place_of_a_plain_network_by_every_method(name: str, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    first = shake(PLAIN[name]().double())
    seen: set[str] = set()
    for place in outgrow.places(first, x):
        for method in place.methods:
            model = copy.deepcopy(first)
            optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-3)
            model(x).square().sum().backward()
            optimizer.step()
            old = copy.deepcopy(model)
            growth = outgrow.deepen(model, x, place.name, count=2, method=method, optimizer=optimizer)
            assert_same_function(old, model, [x] if method == "net2net" else [x, x[:3]])
            assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
            state = model.state_dict()
            kept = [torch.equal(state[growth.plan.renamed(key)], value) for key, value in old.state_dict().items()]
            assert all(kept) == (method != "netmorph")
            outgrow.save(model, path)
            again = outgrow.load(PLAIN[name]().double(), path)
            assert torch.equal(again.eval()(x), model.eval()(x))
            seen.add(method)
    assert {"r2r", "net2net", "netmorph"} <= seen


@pytest.mark.parametrize(("place", "method"), [("2", "r2r"), ("2", "net2net"), ("4", "netmorph"), ("4", "r2r")])
def test_new_layers_learn(place: str, method: str) -> None:
    """After fifty steps at least 95% of the new weights have moved."""
    torch.manual_seed(0)
    model = plain()
    x, y = torch.randn(64, 3, 8, 8), torch.randint(3, (64,))
    growth = outgrow.deepen(model, x, place, method=method)
    (insert,) = growth.plan.inserts
    new = dict(model.get_submodule(insert.path).named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in new.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    before = nn.functional.cross_entropy(model(x), y).item()
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    moved = sum(int((parameter != start[name]).sum()) for name, parameter in new.items())
    assert moved >= 0.95 * sum(parameter.numel() for parameter in new.values())
    assert nn.functional.cross_entropy(model(x), y).item() < before


class OverTokens(nn.Module):
    """A convolution over a sequence, (batch, tokens, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Slices(nn.Module):
    """A convolution in space, averaged to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(2)).mean(2)


@pytest.mark.parametrize(("make", "shape", "other"), [(OverTokens, (2, 6, 5), (2, 9, 5)), (Slices, (2, 3, 4, 4), (2, 3, 7, 6))])
def test_new_layers_go_over_features_never_over_places(
    make: type[nn.Module], shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """The example has as many positions as features, and later inputs have other numbers of positions."""
    model = shake(nn.Sequential(make(), nn.ReLU()).double())
    for after in ("0", "1"):
        for method in ("residual", "net2net") if after == "1" else ("residual",):
            grown = copy.deepcopy(model)
            outgrow.deepen(grown, torch.randn(shape, dtype=torch.float64), after, method=method)
            assert_same_function(model, grown, [torch.randn(size, dtype=torch.float64) for size in (shape, other)])


def test_net2net_needs_an_idempotent_activation() -> None:
    x = torch.randn(6, 3, 8, 8)
    with pytest.raises(MethodError, match=r"aten\.gelu is not idempotent"):
        outgrow.deepen(plain(), x, "5", method="net2net")
    with pytest.raises(MethodError, match="grouped convolution"):
        outgrow.deepen(nn.Sequential(nn.Conv2d(3, 6, 3, groups=3)), x, "0", method="netmorph")


@pytest.mark.parametrize("fade", [None, 3])
def test_an_identity_layer_behind_dropout_takes_statistics_without_it(fade: int | None) -> None:
    parts = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout2d(0.5), nn.ReLU(), nn.Conv2d(6, 2, 1)]
    model, x = shake(nn.Sequential(*parts).double()), torch.randn(6, 3, 8, 8, dtype=torch.float64)
    old = copy.deepcopy(model)
    outgrow.deepen(model, x, "3", method="net2net", fade=fade)
    assert_same_function(old, model, [x])


def test_the_moments_of_a_split_layer_turn_with_it() -> None:
    """The gradient of the split layer after the growth equals the transformed gradient from before."""
    model = shake(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double())
    model(X).square().sum().backward()
    outgrow.deepen(model, X, "0", method="netmorph")
    carried = model[0].weight.grad.clone()
    model.zero_grad()
    model(X).square().sum().backward()
    assert distance(model[0].weight.grad, carried) < 1e-10


@pytest.mark.parametrize("layers", [2, 3, 5])
@pytest.mark.parametrize("fade", [None, 3])
def test_a_residual_block_has_as_many_layers_as_requested(layers: int, fade: int | None) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    old, x = copy.deepcopy(model), torch.randn(5, 3, dtype=torch.float64)
    growth = outgrow.deepen(model, x, "1", layers=layers, count=2, fade=fade)
    assert growth.preserving
    assert_same_function(old, model, [x])
    for new in (model[2], model[3]):
        assert isinstance(new, outgrow.ResidualBlock)
        assert sum(isinstance(part, nn.Linear) for part in new.branch) == layers


def test_a_random_block_in_a_plain_network_says_that_it_does_not_preserve() -> None:
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double(), torch.randn(5, 3, dtype=torch.float64)
    old = copy.deepcopy(model)
    growth = outgrow.deepen(model, x, "1", method="random")
    assert not growth.preserving
    assert "does not preserve" in str(growth)
    assert isinstance(model[2], outgrow.ResidualBlock)
    assert growth.max_error > 1e-3
    assert (model(x) - old(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("wrong", "match"), [({"layers": 1}, "two layers"), ({"layers": 3, "method": "net2net"}, "not build one")]
)
def test_layers_that_make_no_sense_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(outgrow.GrowthError, match=match):
        outgrow.Deepen("1", **wrong)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.relu = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c2(self.relu(self.c1(x)))
        y += x
        return self.relu(y)


@pytest.mark.parametrize("after", ["c1", "c2"])
def test_an_activation_before_code_that_works_in_place_is_refused(after: str) -> None:
    model, x = InPlace().double(), torch.randn(2, 3, 5, 5, dtype=torch.float64)
    before = state_of(model)
    with pytest.raises(MethodError, match="changes its output in place"):
        outgrow.deepen(model, x, after, method="net2net", fade=1)
    assert state_of(model) == before
    outgrow.deepen(model, x, after, method="netmorph", fade=1)


class Shifted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3).add_(1)


def test_a_batch_norm_is_made_the_identity_by_what_stood_there_before_code_that_works_in_place() -> None:
    layers = nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), Shifted(), nn.Conv2d(5, 4, 3)
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 3, 8, 8, dtype=torch.float64)
    old = copy.deepcopy(model)
    outgrow.deepen(model, x, after="2", method="net2net")
    assert_same_function(old, model, [x])


def test_refusals_tell_a_way_out_that_works() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return torch.tanh(self.inner(x) + shift)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = Two(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 2)
            self.odd = Odd()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.odd(self.block(self.first(x, x))))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.layer(x))

    model, x = Net().double(), torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(MethodError, match="calls it with 2 arguments: name a layer inside it"):
        outgrow.deepen(model, x, "first")
    outgrow.deepen(model, x, "first.inner")
    with pytest.raises(MethodError, match=r"an outgrow\.ResidualBlock can follow it: write method='residual'"):
        outgrow.deepen(model, x, "odd")
    outgrow.deepen(model, x, "odd", method="residual")


def test_a_block_that_fades_in_where_none_can_be_copied_is_reported_as_random() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    growth = outgrow.deepen(model, x, "1", fade=6)
    assert growth.plan.changes[0].method == "random, faded in over 6 steps"
    assert bool((model[2].branch(x @ torch.ones(5, 4).double()) == 0).all())
    weights = model[2].branch[0].weight
    assert not any(torch.equal(weights[0], row) for row in weights[1:])  # not paired
