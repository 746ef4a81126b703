"""Optimizer classes are found by the exact class, or by the base class that does the arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outgrow.errors import OptimizerError
from outgrow.optimizers.lookup import state_shape, unfollowable
from outgrow.optimizers.register_optimizer import register_optimizer
from outgrow.optimizers.state_rules import WORDS


def parameter() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 4))]


class Renamed(torch.optim.AdamW):
    """Another default, the same arithmetic."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)


class Overriding(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "SparseAdam", "Adamax", "Adagrad", "Adadelta"])
def test_optimizers_of_torch_can_follow_before_their_first_step(name: str) -> None:
    assert unfollowable(getattr(torch.optim, name)(parameter(), lr=0.1)) == ""


def test_subclasses_are_known_unless_they_compute_something_else() -> None:
    assert unfollowable(Renamed(parameter())) == ""
    assert "overrides AdamW.step" in unfollowable(Overriding(parameter()))
    assert "Own is none of the classes" in unfollowable(Own(parameter()))
    assert "flat vectors" in unfollowable(torch.optim.LBFGS(parameter()))


def test_a_registered_class_is_known_and_wrong_words_are_listed() -> None:
    class Described(Own):
        pass

    with pytest.raises(
        OptimizerError, match=r"'trace'(.|\n)*'first momentum' is no rule(.|\n)*'first moment', 'second moment'"
    ):
        register_optimizer(Described, {"trace": "first momentum"})
    assert unfollowable(Described(parameter())) != ""
    register_optimizer(Described, {"trace": "first moment"})
    assert unfollowable(Described(parameter())) == ""
    assert unfollowable(Own(parameter())) != ""
    for wrong in (Described(parameter()), torch.optim.Optimizer, dict):
        with pytest.raises(OptimizerError, match="is no optimizer class"):
            register_optimizer(wrong, {})  # type: ignore[arg-type]
    with pytest.raises(OptimizerError, match="needs its 'column means'"):
        register_optimizer(Described, {"rows": "row means"})
    with pytest.raises(OptimizerError, match="write a dict"):
        register_optimizer(Described, ["trace"])  # type: ignore[arg-type]


def test_only_known_shapes_are_judged() -> None:
    adam, factored = torch.optim.Adam(parameter()), torch.optim.Adafactor(parameter())
    assert state_shape(adam, "exp_avg", torch.ones(3, 4), (5, 4)) == (5, 4)
    assert state_shape(adam, "step", torch.ones(()), (5, 4)) is None
    assert state_shape(adam, "curvature", torch.ones(3, 4), (5, 4)) is None
    assert state_shape(Own(parameter()), "exp_avg", torch.ones(3, 4), (5, 4)) is None
    assert state_shape(factored, "row_var", torch.ones(3, 1), (5, 4)) == (5, 1)
    assert state_shape(factored, "col_var", torch.ones(1, 4), (5, 4)) == (1, 4)


def test_wrappers_count_with_what_they_wrap() -> None:
    from accelerate.optimizer import AcceleratedOptimizer

    class Wrapper(torch.optim.Optimizer):
        """A wrapper without a description, around a known optimizer."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(parameter(), {})
            self.optimizer = optimizer
            self.state = optimizer.state

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    assert unfollowable(Wrapper(torch.optim.Adam(parameter()))) != ""
    plain, odd = (AcceleratedOptimizer.__new__(AcceleratedOptimizer) for _ in range(2))
    plain.optimizer, odd.optimizer = torch.optim.Adam(parameter()), Own(parameter())
    assert unfollowable(plain) == ""
    assert "Own is none" in unfollowable(odd)


def test_the_description_of_the_call_names_every_word() -> None:
    told = register_optimizer.__doc__ or ""
    words = told.partition("one of the words")[2].partition("; docs/")[0]
    assert sorted(words.split('"')[1::2]) == sorted(WORDS)
