"""Fades: exact at growth, no jump later, nothing left at the end; they survive copies, growths, saves and loads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError
from outgrow.modules.gates import gates_of
from tests.helpers.fading import steps
from tests.helpers.judging import assert_same_function, distance, shake
from tests.helpers.residual_chain import Block, X, chain


def levels(model: nn.Module) -> list[float]:
    return [round(float(gate.level), 6) for gate in gates_of(model).values()]


def test_a_copied_block_fades_in_and_leaves_no_trace() -> None:
    model = chain(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    old, keys = copy.deepcopy(model), set(model.state_dict())
    growth = outgrow.deepen(model, X, "2.1", fade=4, optimizer=optimizer)
    assert growth.preserving
    assert "faded in over 4 steps" in str(growth)
    assert_same_function(old, model, [X, X[:2]])
    assert set(model.state_dict()) == keys | {f"2.2.{name}" for name in Block().state_dict()}
    assert torch.equal(model[2][2].a.weight, model[2][1].a.weight)
    whole = copy.deepcopy(model)
    for module in whole.modules():
        module._forward_hooks.clear()
    branch = whole(X) - old(X)
    assert branch.abs().max() > 1e-3
    for done in (1, 2, 3):
        steps(model, optimizer, 1)
        assert levels(model) == [done / 4]
        inner = model[2][2](model[2][:2](model[:2](X))) - model[2][:2](model[:2](X))
        full = whole[2][2](whole[2][:2](whole[:2](X))) - whole[2][:2](whole[:2](X))
        assert distance(full.detach() * done / 4, inner.detach()) < 1e-12
    steps(model, optimizer, 1)
    assert gates_of(model) == {}
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(X), whole(X))


def test_the_loss_does_not_jump_on_the_way() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(5, (16,))

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def step() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.item()

    for _ in range(5):
        step()
    before = loss().item()
    outgrow.deepen(model, x, "blocks.1", fade=20, optimizer=optimizer)
    assert sorted(gates_of(model)) == ["blocks.2.attn.proj", "blocks.2.mlp.fc2"] or len(gates_of(model)) == 2
    after = [step() for _ in range(25)]
    assert abs(after[0] - before) < 1e-5
    assert max(after) < 1.1 * before
    assert gates_of(model) == {}


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "mobilenetv3_small_050"])
def test_blocks_of_other_libraries_fade_in(name: str) -> None:
    places = {"resnet18": "layer2.1", "convnext_atto": "stages.2.blocks.1", "mobilenetv3_small_050": "blocks.2.1"}
    model = shake(timm.create_model(name, num_classes=5).double())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    old = copy.deepcopy(model)
    outgrow.deepen(model, x, places[name], fade=10)
    assert_same_function(old, model, [x])
    assert len(gates_of(model)) == 1


@pytest.mark.parametrize("method", ["net2net", "netmorph", "residual", "random"])
def test_any_new_activation_is_exact_if_it_fades_in(method: str, path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    model = shake(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    old = copy.deepcopy(model)
    growth = outgrow.deepen(model, X, "2" if method == "netmorph" else "3", method=method, fade=3, optimizer=optimizer)
    assert growth.preserving
    assert_same_function(old, model, [X, X[:2]])
    steps(model, optimizer, 1)
    assert levels(model) == [pytest.approx(1 / 3, abs=1e-5)]
    outgrow.save(model, path)
    again = outgrow.load(build(), path)
    assert levels(again) == levels(model)
    assert torch.equal(again(X), model(X))
    steps(model, optimizer, 2)
    follower = torch.optim.SGD(again.parameters(), lr=0.0)
    steps(again, follower, 2)
    for one in (model, again):
        assert gates_of(one) == {}
        assert not any(isinstance(module, outgrow.PActivation) or module._forward_hooks for module in one.modules())
    assert torch.equal(again(X), model(X))
    outgrow.save(model, path)
    final = outgrow.load(build(), path)
    assert torch.equal(final(X), model(X))
    assert not any(isinstance(module, outgrow.PActivation) for module in final.modules())


def test_a_fade_survives_growths_copies_and_pickles() -> None:
    model = chain(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)
    averaged = average(X).detach()
    outgrow.deepen(model, X, "2.1", fade=6, optimizer=optimizer, average=average)
    assert distance(averaged, average(X).detach()) < 1e-12
    steps(model, optimizer, 2)
    old = copy.deepcopy(model)
    assert levels(old) == levels(model) == levels(average.module) == [pytest.approx(1 / 3, abs=1e-5)]
    outgrow.widen(model, X, "2.*.a", factor=1.5, optimizer=optimizer, average=average)
    outgrow.deepen(model, X, "2.2", optimizer=optimizer, average=average)
    assert_same_function(old, model, [X])
    assert len(gates_of(model)) == 1
    revived = pickle.loads(pickle.dumps(model))
    assert torch.equal(revived(X), model(X))
    assert levels(revived) == levels(model)
    steps(model, optimizer, 4)
    assert gates_of(model) == gates_of(average.module) == {}
    assert len(gates_of(revived)) == 1
    steps(revived, torch.optim.SGD(revived.parameters(), lr=0.0), 4)
    assert gates_of(revived) == {}


def test_a_copy_fades_by_itself_and_two_optimizers_are_one_step() -> None:
    model = chain(Block(), Block())
    outgrow.deepen(model, X, "2.1", fade=4)
    fork = copy.deepcopy(model)
    steps(fork, torch.optim.SGD(fork.parameters(), lr=0.0), 3)
    assert (levels(model), levels(fork)) == ([0.0], [0.75])
    parts = list(model[2][2].parameters())
    for part in (parts[:1], parts[1:]):
        steps(model, torch.optim.SGD(part, lr=0.1), 1)
    assert levels(model) == [0.25]


def test_other_optimizers_do_not_move_a_gate() -> None:
    model, other = chain(Block(), Block()), chain(Block())
    outgrow.deepen(model, X, "2.1", fade=3)
    steps(other, torch.optim.SGD(other.parameters(), lr=0.1), 5)
    assert levels(model) == [0.0]


@pytest.mark.parametrize(
    ("fade", "method", "words"), [(0, "auto", "above 0"), (2.5, "auto", "above 0"), (5, "r2r", "leave fade out")]
)
def test_fades_that_are_refused(fade: Any, method: str, words: str) -> None:
    with pytest.raises(GrowthError, match=words):
        outgrow.deepen(chain(Block(), Block()), X, "2.1", method=method, fade=fade)


def test_attention_of_torch_fades_in() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double(), torch.randn(3, 4, 8, dtype=torch.float64)
    shake(model)
    old, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0)
    outgrow.deepen(model, x, "layers.0", fade=2, optimizer=optimizer)
    assert_same_function(old, model, [x])
    steps(model, optimizer, 2, x)
    assert gates_of(model) == {}
    assert distance(old(x).detach(), model(x).detach()) > 1e-3


def test_a_frozen_block_fades_in_with_the_model_around_it() -> None:
    model = chain(Block(), Block())
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    outgrow.deepen(model, X, "2.1", fade=2, optimizer=optimizer)
    steps(model, optimizer, 2)
    assert gates_of(model) == {}


def test_an_activation_that_was_inserted_by_hand_fades_in() -> None:
    model = nn.Sequential(nn.Linear(5, 8), outgrow.PActivation(nn.Tanh(), steps=3), nn.Linear(8, 3))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(4, 5)
    steps(model, optimizer, 3, x)
    assert model[1].level == 1.0
    assert torch.equal(model(x), model[2](torch.tanh(model[0](x))))
    for wrong in ((1, 2), (nn.ReLU(), 0), (nn.ReLU(), 1.5)):
        with pytest.raises(GrowthError):
            outgrow.PActivation(*wrong)


def test_an_activation_that_was_wrapped_later_is_still_replaced() -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 2)).double()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(4, 3, dtype=torch.float64)
    outgrow.deepen(model, x, "1", method="net2net", fade=3, optimizer=optimizer)
    path = next(path for path, module in model.named_modules() if isinstance(module, outgrow.PActivation))
    parent, _, key = path.rpartition(".")
    wrapped = nn.Sequential(model.get_submodule(path))
    model.get_submodule(parent)._modules[key] = wrapped
    steps(model, optimizer, 3, x)
    assert gates_of(model) == {}
    assert not any(isinstance(module, outgrow.PActivation) for module in model.modules())


class Activated(nn.Module):
    """x + ψ(f(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def activated() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), Activated(), nn.Linear(4, 2)).double()


def test_a_gate_on_an_activation_that_fades_in_stays_when_that_is_replaced(tmp_path: Path) -> None:
    model, x = shake(activated(), 0), torch.randn(5, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    outgrow.deepen(model, x, "1.f", method="net2net", fade=3, optimizer=optimizer)
    steps(model, optimizer, 1, x)
    outgrow.deepen(model, x, "1", method="copy", fade=6, optimizer=optimizer)
    layers = [model.get_submodule(path) for path in ("1.f.0.0", "1.f.1.0", "2.f.0.0", "2.f.1.0")]
    for done in range(8):
        soft, gate = min((done + 1) / 3, 1), min(done / 6, 1)
        y = model[0](x)
        for (first, second), level in zip((layers[:2], layers[2:]), (1.0, gate), strict=True):
            inner = second(torch.tanh(first(y)))
            y = y + level * ((1 - soft) * inner + soft * torch.tanh(inner))
        assert torch.allclose(model[3](y), model(x), rtol=0, atol=1e-7)  # levels are single precision
        outgrow.save(model, tmp_path / "model.safetensors")
        assert torch.equal(outgrow.load(activated(), tmp_path / "model.safetensors")(x), model(x))
        steps(model, optimizer, 1, x)
    assert not gates_of(model)


def test_nothing_is_inserted_into_an_activation_that_fades_in() -> None:
    model, x = activated(), torch.randn(5, 3, dtype=torch.float64)
    outgrow.deepen(model, x, "1.f", method="net2net", fade=3)
    assert not next(place for place in outgrow.places(model, x) if place.name == "1.f.1.1.activation").growable
    with pytest.raises(GrowthError, match=r"it replaces 1\.f\.1\.1"):
        outgrow.deepen(model, x, "1.f.1.1.activation")
    outgrow.deepen(model, x, "1.f.1.1", method="residual")


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("grow", ["block", "activation", "units", "branch"])
def test_loading_restores_the_model_in_the_middle_of_a_fade(grow: str, more: int, path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.Sequential(Block(), Block()), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if grow == "block":
        outgrow.deepen(model, X, "2.1", fade=4, optimizer=optimizer)
    elif grow == "activation":
        outgrow.deepen(model, X, "1", method="net2net", fade=4, optimizer=optimizer)
    elif grow == "units":
        outgrow.widen(model, X, "2.0.a", by=2, fade=4, optimizer=optimizer)
    else:
        outgrow.branch(model, X, "2", fade=4, optimizer=optimizer)
    twin = copy.deepcopy(model)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.0)
    steps(model, optimizer, 2)
    steps(twin, theirs, 2)
    outgrow.save(model, path)
    steps(model, optimizer, more)
    outgrow.load(model, path)
    for _ in range(3):  # training continues as without the file
        assert torch.equal(model(X), twin(X))
        steps(model, optimizer, 1)
        steps(twin, theirs, 1)
    assert gates_of(model) == {}
    assert str(model) == str(twin)
