"""A growth that is refused for its outputs names the volumes that are responsible."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.engine.responsible_volumes import halved
from outgrow.errors import VerifyError
from tests.helpers.judging import state_of


class Sized(nn.Module):
    """A model whose code multiplies by the sizes of some of its layers, which no trace shows."""

    def __init__(self, *sized: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), nn.Linear(6, 2)
        self.sized = sized

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for number in self.sized:
            x = x * torch.tensor(self.layers[number].out_features / 6)
        return self.head(x)


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sized", [(2,), (0, 3)])
def test_a_glob_names_the_volumes_that_change_the_outputs(sized: tuple[int, ...]) -> None:
    model = Sized(*sized)
    before = state_of(model)
    with pytest.raises(VerifyError) as caught:
        outgrow.widen(model, X, "*", factor=2)
    assert state_of(model) == before
    guilty = {f"layers.{number}" for number in sized}
    named = [problem.where for problem in caught.value.problems if problem.where]
    assert set(named) == guilty
    others = [f"layers.{number}" for number in range(5) if number not in sized]
    assert repr(others) in str(caught.value)
    old = copy.deepcopy(model)
    outgrow.widen(model, X, others, factor=2)  # the way out that it names
    torch.testing.assert_close(model(X), old(X))


def test_one_volume_is_named_by_itself() -> None:
    with pytest.raises(VerifyError, match=r"layers\.2: its growth changes the outputs"):
        outgrow.widen(Sized(2), X, "layers.2", factor=2)


def test_halving_finds_groups_that_differ_only_together() -> None:
    names = list("abcdefgh")
    assert halved(names, lambda some: {"c", "d"} <= set(some)) == [("c", "d")]
    assert halved(names, lambda some: "a" in some or "h" in some) == [("a",), ("h",)]
    assert halved(names, lambda some: {"a", "h"} <= set(some)) == [tuple(names)]
