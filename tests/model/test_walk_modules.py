"""The quick walk over modules is torch's own, also where classes change what torch does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outgrow.model.sandbox import untouched
from outgrow.model.walk_modules import all_modules, module_at, set_mode


class Hides(nn.Module):
    """Leaves its child out of the list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 2)

    def named_modules(self, memo: Any = None, prefix: str = "", *_: Any, **__: Any) -> Iterator[tuple[str, nn.Module]]:
        yield prefix, self


class StaysInEval(nn.BatchNorm1d):
    """A frozen norm."""

    def train(self, mode: bool = True) -> StaysInEval:
        return super().train(False)


def shared() -> nn.Module:
    one = nn.Linear(2, 2)
    model = nn.Sequential(one, nn.Sequential(one, nn.ReLU()), nn.ModuleDict({"a": one, "b": nn.ModuleList([nn.ReLU()])}))
    model.register_module("nothing", None)
    return model


MODELS = {
    "shared": shared,
    "leaf": lambda: nn.ReLU(),
    "deep": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "hides": lambda: nn.Sequential(nn.ReLU(), nn.Sequential(Hides(), nn.ReLU())),
    "frozen": lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(StaysInEval(2), nn.Dropout())),
    "cycle": lambda: cycle(),
}


def cycle() -> nn.Module:
    model = nn.Sequential(nn.ReLU())
    model[0].back = model
    return model


@pytest.mark.parametrize("name", MODELS)
def test_modules_are_those_of_torch_in_their_order(name: str) -> None:
    model = MODELS[name]()
    found, expected = all_modules(model), list(model.named_modules())
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert all(one is other for (_, one), (_, other) in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_paths_lead_to_the_modules_of_torch(name: str) -> None:
    model = MODELS[name]()
    for path, module in model.named_modules(remove_duplicate=name == "cycle"):
        assert module_at(model, path) is module


def test_paths_that_torch_refuses_or_finds_elsewhere() -> None:
    class Elsewhere(nn.Module):
        def get_submodule(self, target: str) -> nn.Module:
            return other if target == "a" else super().get_submodule(target)

    other, model = nn.ReLU(), nn.Sequential(nn.Linear(2, 2))
    model.register_module("nothing", None)
    for wrong in ("1", "0.weight", "nothing", "0.a.b"):
        with pytest.raises(AttributeError):
            module_at(model, wrong)
    assert module_at(Elsewhere(), "a") is other


@pytest.mark.parametrize("name", [name for name in MODELS if name != "cycle"])  # torch's own `train` does not end there
@pytest.mark.parametrize("training", [True, False])
def test_modes_are_those_that_torch_sets(name: str, training: bool) -> None:
    ours, theirs = MODELS[name](), MODELS[name]()
    for model in (ours, theirs):
        for number, module in enumerate(model.modules()):
            module.training = number % 2 == 0
    set_mode(ours, training)
    theirs.train(training)
    modes = [[module.training for module in everything(model)] for model in (ours, theirs)]
    assert modes[0] == modes[1]


def everything(module: nn.Module) -> list[nn.Module]:
    return [module, *(inner for child in module._modules.values() if child is not None for inner in everything(child))]


def test_a_train_method_of_an_instance_is_called() -> None:
    model, seen = nn.Sequential(nn.ReLU()), []
    model[0].train = lambda mode=True: seen.append(mode)
    set_mode(model, False)
    assert seen == [False]


def test_containers_that_a_pass_fills_or_empties_are_restored() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filled: list[int] = []
            self.emptied, self.both, self.names = [1, 2], {"a": 1}, {"x"}

        def forward(self, x: Tensor) -> Tensor:
            self.filled.append(3)
            self.emptied.clear()
            self.both["b"] = self.both.pop("a")
            self.names.clear()
            self.register_forward_hook(lambda *_: None)
            return x

    model = nn.Sequential(Keeps())
    held = [model[0].filled, model[0].emptied, model[0].both, model[0].names, model[0]._forward_hooks]
    with untouched(model):
        model(torch.zeros(1))
        assert model[0].filled == [3]
    assert held[:4] == [[], [1, 2], {"a": 1}, {"x"}]
    assert len(held[4]) == 0
    assert all(one is other for one, other in zip(held[:4], (model[0].filled, model[0].emptied, model[0].both), strict=False))
