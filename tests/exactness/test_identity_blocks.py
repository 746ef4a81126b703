"""Blocks with an activation after their sum that is not idempotent: their copies start it as a P-activation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import MethodError
from tests.helpers.fading import steps
from tests.helpers.judging import assert_same_function, shake

X = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FRESH = [torch.randn(4, 3, 7, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]


class Block(nn.Module):
    """ψ(x + f(x)), with ψ a module that the branch uses too."""

    def __init__(self, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
        self.norm, self.act = nn.BatchNorm2d(4), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm(self.two(self.act(self.one(x)))))


class Apart(Block):
    """The same with one module for the branch and another behind the sum."""

    def __init__(self, act: Callable[[], nn.Module]) -> None:
        super().__init__(act)
        self.inner = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.norm(self.two(self.inner(self.one(x)))))


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x + self.norm(self.two(self.act(self.one(x)))))


class TwoNames(Apart):
    def __init__(self, act: Callable[[], nn.Module]) -> None:
        super().__init__(act)
        self.inner = self.act


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "silu, in place": lambda: nn.SiLU(inplace=True),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def stack(kind: type[Block], act: Callable[[], nn.Module], count: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), *(kind(act) for _ in range(count)), nn.Conv2d(4, 2, 1)).double()


def made(kind: type[Block] = Block, act: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    torch.manual_seed(0)
    return shake(stack(kind, act, 2)).eval()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("kind", [Block, Apart])
def test_the_copy_starts_as_the_identity_and_ends_as_a_plain_block(name: str, kind: type[Block]) -> None:
    model = made(kind, ACTIVATIONS[name])
    old = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    growth = outgrow.deepen(model, X, "1", fade=4, optimizer=optimizer)
    assert growth.plan.inserts[0].start.soft == ("act",)
    assert isinstance(model[2].act, outgrow.PActivation)
    assert_same_function(old, model, FRESH)
    for done in range(1, 5):
        steps(model, optimizer, 1, X)
        moved = (model(FRESH[0]) - old(FRESH[0])).abs().max()
        assert moved > 0, done
    plain = stack(kind, ACTIVATIONS[name], 3)
    plain.load_state_dict(model.state_dict())
    assert type(model[2].act) is type(old[1].act)
    assert not any(isinstance(module, outgrow.PActivation) or module._forward_hooks for module in model.modules())
    assert torch.equal(plain.eval()(FRESH[0]), model.eval()(FRESH[0]))


def test_a_fade_in_progress_is_saved_and_continues_after_loading(tmp_path: Path) -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    average = torch.optim.swa_utils.AveragedModel(model)
    outgrow.deepen(model, X, "1", fade=4, optimizer=optimizer, average=average)
    assert isinstance(average.module[2].act, outgrow.PActivation)
    steps(model, optimizer, 2, X)
    outgrow.save(model, tmp_path / "model.safetensors")
    fresh = stack(Block, nn.GELU, 2)
    outgrow.load(fresh, tmp_path / "model.safetensors")
    assert fresh[2].act.level == model[2].act.level == average.module[2].act.level == 0.5
    assert torch.equal(fresh.eval()(FRESH[0]), model.eval()(FRESH[0]))
    for one in (model, fresh):
        steps(one.train(), torch.optim.SGD(one.parameters(), lr=1e-3), 2, X)
    assert type(fresh[2].act) is type(model[2].act) is type(average.module[2].act) is nn.GELU
    assert torch.equal(fresh.eval()(FRESH[0]), model.eval()(FRESH[0]))


def test_several_copies_and_a_second_growth_during_the_fade() -> None:
    model = made()
    old = copy.deepcopy(model)
    outgrow.deepen(model, X, "1", count=2, fade=4)
    outgrow.deepen(model, X, "2", fade=4)
    assert len(model) == 7
    assert_same_function(old, model, FRESH)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.0), 4, X)
    assert [type(block.act) for block in model[1:-1]] == [nn.GELU] * 5


@pytest.mark.parametrize("kind", [Functional, TwoNames])
def test_if_nothing_can_take_the_place_of_an_activation_the_whole_block_fades_in(kind: type[Block]) -> None:
    model = made(kind)
    old = copy.deepcopy(model)
    growth = outgrow.deepen(model, X, "1", method="copy", fade=4)
    assert growth.plan.inserts[0].start.whole
    assert_same_function(old, model, FRESH)


def test_without_a_fade_the_refusal_names_it() -> None:
    model = made()
    with pytest.raises(MethodError, match=r"gelu after its sum is not idempotent(.|\n)*with fade= any activation is exact"):
        outgrow.deepen(model, X, "1", method="r2r-paper")


def test_a_resnet_of_timm_with_silu() -> None:
    timm = pytest.importorskip("timm")
    model = shake(timm.create_model("test_resnet", num_classes=3, act_layer="silu").double()).eval()
    old = copy.deepcopy(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    outgrow.deepen(model, x, "layer1.0", fade=3)
    assert isinstance(model.layer1[1].act2, outgrow.PActivation)
    assert_same_function(old, model, [torch.randn(3, 3, 48, 48, dtype=torch.float64)])
