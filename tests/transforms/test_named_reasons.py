"""Refusals of requests name the place, the argument or the user's function, and leave the model unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow


class Residual(nn.Module):
    """A network without containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        result: Tensor = self.out(x + self.b(torch.relu(self.a(x))))
        return result


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def test_a_wrong_name_for_deepen_is_answered_with_those_of_places() -> None:
    names = [place.name for place in outgrow.places(Residual(), X)]
    with pytest.raises(outgrow.GrowthError, match=rf"candidates are {', '.join(names)}$"):
        outgrow.deepen(Residual(), X, "q")


@pytest.mark.parametrize("where", [[], (), ""])
def test_an_empty_selection_is_answered_with_a_sentence(where: Any) -> None:
    with pytest.raises(outgrow.GrowthError, match=r"selects nothing: write a name or a glob"):
        outgrow.widen(Residual(), X, where, factor=2)


@pytest.mark.parametrize("check", ["yes", 1, None])
def test_check_is_true_or_false(check: Any) -> None:
    model = Residual()
    with pytest.raises(outgrow.GrowthError, match=r"check=.*: write True or False"):
        outgrow.widen(model, X, "a", factor=2, check=check)
    assert model.a.out_features == 12


def raising(old: Tensor, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    raise RuntimeError("no draws today")


def of_two_arguments(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize(("init", "reason"), [(raising, "no draws today"), (of_two_arguments, "TypeError")])
def test_an_error_in_a_function_for_init_names_the_function(init: Any, reason: str) -> None:
    model = Residual()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match=rf"init={init.__name__} failed for [ab]\..*{reason}"):
        outgrow.widen(model, X, "a", factor=2, method=outgrow.R2R(init=init))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_norm_of_the_model_itself_is_named_so() -> None:
    class Normed(nn.Module):
        """The ε of its norm is written in the code, and what writes its features can't be rescaled: a tanh reads them too."""

        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out, self.bare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            result: Tensor = self.out(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
            return result + self.bare(x.tanh())

    with pytest.raises(outgrow.GrowthError) as refusal:
        outgrow.widen(Normed(), X, "inp", factor=2, method=outgrow.NetMorph(zero="writers"))
    assert "the norm in the model keeps its ε = 1e-05" in str(refusal.value)


def test_the_way_out_of_a_refused_method_is_another_method_if_there_is_one() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    with pytest.raises(outgrow.GrowthError, match="write method='auto', which takes mean there"):
        outgrow.widen(model, X, "0", by=4, method="r2r")
    outgrow.widen(model, X, "0", by=4, method="auto")
    with pytest.raises(outgrow.GrowthError) as refused:
        outgrow.widen(model, X, "2", by=4, method="r2r")
    assert "auto" not in str(refused.value)
