"""Hooks of a copied block: the user's are not copied, the model's own are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import outgrow
from tests.helpers.small_runs import DEEPEN, X, loss_of, mlp


class Recorder:
    """A hook of a user with large contents, which must not be copied."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a recorder was copied")

    def record(self, module: nn.Module, args: Any, output: Any) -> None:
        self.seen.append(output)


def test_a_recorder_records_only_its_own_block_and_can_be_removed() -> None:
    model, recorder, inside, backward = mlp(), Recorder(), list[Any](), list[Any]()
    block = model.blocks[0]
    handles = [
        block.register_forward_hook(recorder.record),
        block.up.register_forward_hook(lambda module, args, kwargs, out: inside.append(module), with_kwargs=True),
        block.down.register_forward_pre_hook(lambda module, args: inside.append(module)),
        block.register_full_backward_hook(lambda module, before, after: backward.append(module)),
    ]
    outgrow.grow(model, X, DEEPEN)
    assert len(model.blocks) == 3
    recorder.seen.clear(), inside.clear(), backward.clear()
    loss_of(model, 0).backward()
    assert len(recorder.seen) == 1
    assert inside == [block.up, block.down]
    assert backward == [block]
    for handle in handles:
        handle.remove()
    loss_of(model, 1).backward()
    assert (len(recorder.seen), len(inside), len(backward)) == (1, 2, 1)
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    assert not any(getattr(module, name) for module in model.modules() for name in names)


def test_hooks_of_torch_are_copied() -> None:
    """Spectral norm and pruning compute the weight before each pass: a block without that would not learn."""
    for dress in (lambda layer: nn.utils.spectral_norm(layer), lambda layer: prune.l1_unstructured(layer, "weight", 0.5)):
        model = mlp()
        for block in model.blocks:
            dress(block.up)
        outgrow.deepen(model, X, "blocks.0", method="copy")
        new = model.blocks[1].up
        assert len(new._forward_pre_hooks) == 1
        before = [block.up.weight.detach().clone() for block in model.blocks[:2]]
        with torch.no_grad():
            new.weight_orig.neg_()
        model(X)
        assert (new.weight * before[1]).sum() < 0  # computed again from the changed parameters
        assert (model.blocks[0].up.weight * before[0]).sum() > 0


class Counting(nn.Module):
    """Counts its passes with a hook of its own; the model around it counts them too."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.calls = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), 0
        self.f.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, output: Any) -> None:
        assert module is self.f
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.f(x)
        return result


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.calls = nn.Sequential(Counting(), Counting()), 0
        for block in self.blocks:
            block.register_forward_hook(self.count)

    def count(self, module: nn.Module, args: Any, output: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


@pytest.mark.parametrize("fade", [None, 3])
def test_methods_of_the_model_are_copied(fade: int | None) -> None:
    torch.manual_seed(0)
    model = Whole()
    x = torch.randn(4, 6)
    before = model(x)
    outgrow.deepen(model, x, "blocks.0", fade=fade)
    for block in model.blocks:
        block.calls = 0
    model.calls = 0
    torch.testing.assert_close(model(x), before)
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    assert model.calls == 3
