"""Which growths a space allows, and its limits."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import OptimizerError, SearchError
from outgrow.search.moves import Move

X = torch.randn(2, 3, 8, 8)


def cnn() -> nn.Sequential:
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


def summaries(space: outgrow.Space, model: nn.Module) -> list[str]:
    return [growth.summary for growth in space.growths(model, X)]


def test_the_growths_are_those_that_the_space_selects() -> None:
    assert summaries(outgrow.Space(widen="2", factors=(2,), deepen=()), cnn()) == ["Widen '2' × 2"]
    assert summaries(outgrow.Space(widen=(), deepen=["1", "3"]), cnn()) == ["Deepen after '1' + 1", "Deepen after '3' + 1"]
    kernels = outgrow.Space(widen=(), deepen=(), kernels=(3, 5), branches="2")
    assert summaries(kernels, cnn()) == ["Kernel '0' to 5", "Kernel '2' to 5", "Branch beside '2'"]
    assert {growth.where for growth in outgrow.Space(deepen=()).growths(cnn(), X)} == {"0", "2"}


def test_every_growth_of_a_space_is_exact() -> None:
    space = outgrow.Space(widen=("0", "2"), factors=(1.5,), deepen="3", kernels=(5,), branches="0")
    other = torch.randn(5, 3, 8, 8)
    for growth in space.growths(cnn(), X):
        model = cnn().eval()
        before = model(other)
        Move(growth, seed=3).carry_out(model, X)
        assert sum(p.numel() for p in model.parameters()) > sum(p.numel() for p in cnn().parameters())
        torch.testing.assert_close(model(other), before, rtol=1e-4, atol=1e-5)


def test_samples_stay_within_the_limits() -> None:
    first = sum(parameter.numel() for parameter in cnn().parameters())
    space = outgrow.Space(factors=(1.5, 4), deepen=(), moves=3, parameters=2 * first)
    for seed in range(2):
        model = cnn()
        moves = space.sample(model, X, [], Random(seed))
        assert 1 <= len(moves) <= 3
        assert first < sum(parameter.numel() for parameter in model.parameters()) <= 2 * first
    assert space.sample(grown := cnn(), X, [], Random(0)) == space.sample(again := cnn(), X, [], Random(0))
    assert [p.shape for p in grown.parameters()] == [p.shape for p in again.parameters()]
    tight = outgrow.Space(deepen=(), parameters=first + 1)
    assert tight.sample(copy.deepcopy(again), X, [], Random(0)) == []


def test_kinds_select_volumes() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, dropout=0.0)
    space = outgrow.Space(kinds=["mlp"], factors=(2,), deepen=())
    found = [growth.where for growth in space.growths(layer, torch.randn(2, 3, 8))]
    assert found == ["linear1"]


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (outgrow.Space(widen="nothing", deepen=()), "nothing can grow in this space"),
        (outgrow.Space(widen="nothing", deepen=()), "volumes that can grow, but are not selected: 0, 2"),
        (outgrow.Space(deepen=(), parameters=10), "and the limit is 10: raise parameters="),
        (outgrow.Space(deepen=(), flops=10), "nothing can grow within the limits"),
        (outgrow.Space(widen=(), deepen=(), kernels=(4,)), r"Kernel '0' to 4: .*one of 4 would need padding on one side"),
    ],
)
def test_a_space_in_which_nothing_can_grow(space: outgrow.Space, said: str) -> None:
    with pytest.raises(SearchError, match=said):
        space.refuse_if_empty(cnn(), X)


def test_an_optimizer_that_can_follow_no_growth_is_an_error_and_not_a_trial_without_growth() -> None:
    model, other, space = cnn(), cnn(), outgrow.Space(deepen=())
    foreign, flat = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.LBFGS(model.parameters())
    with pytest.raises(SearchError, match=r"nothing can grow in this space: (.|\n)*belongs to another model"):
        space.refuse_if_empty(model, X, [foreign])

    def closure() -> torch.Tensor:
        flat.zero_grad()
        loss: torch.Tensor = model(X).square().mean()
        loss.backward()
        return loss

    flat.step(closure)  # its state does not grow
    for optimizer, said in ((foreign, "belongs to another model"), (flat, "LBFGS remembers past steps")):
        with pytest.raises(OptimizerError, match=said):
            space.sample(model, X, [optimizer], Random(0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"widen": 3}, "widen=3: write a name or a glob"),
        ({"factors": (0.5,)}, "write factors above 1"),
        ({"factors": 2}, "factors=2: write a list"),
        ({"kinds": ["mpl"]}, "'mpl' is none of 'mlp'"),
        ({"moves": 0}, "moves=0"),
        ({"shrink": 2}, "shrink=2: write a probability"),
        ({"parameters": -1}, "parameters=-1"),
        ({"kernels": ("5",)}, r"write sizes, e\.g\. kernels="),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SearchError, match=said):
        outgrow.Space(**options)
    with pytest.raises(outgrow.GrowthError, match="did you mean 'factors'"):
        outgrow.Space(factor=(2,))  # type: ignore[call-arg]
