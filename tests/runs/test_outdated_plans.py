"""A model whose code changes in mid-run, after its growths were planned: the refusal says so, and its way out works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import outgrow
from outgrow.errors import ApplyError, VerifyError
from tests.helpers.small_runs import DEEPEN, WIDEN, Block, Mlp, X, at, facts, mlp, started, train
from tests.helpers.training_run import assert_equal


class Normed(Block):
    """A block with a norm over the units: there, pairs of equal units are not exact, whole copies are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + self.down(nn.functional.layer_norm(hidden, hidden.shape[-1:]))


class Sized(Block):
    """A block whose code assumes eight units."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)).view(-1, 8))


class Unrolled(Mlp):
    """A network that runs two blocks, whatever their number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](torch.tanh(self.stem(x)))))


class Counting(Mlp):
    """A network whose outputs depend on the number of its blocks, which only a comparison of outputs detects."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.tanh(self.stem(x))) / len(self.blocks))


class Bare(nn.Module):
    """A layer without attributes for its sizes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def becomes(kind: type[nn.Module], part: str = "") -> Callable[[nn.Module], None]:
    return lambda model: setattr(model.get_submodule(part), "__class__", kind)


def without_sizes(model: Any) -> None:
    model.blocks[0].up = Bare(model.blocks[0].up)


def in_training(*grow: Any, **options: Any) -> tuple[Mlp, AdamW, outgrow.Run]:
    """A run one step before its growth."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    run = started(model, optimizer, [at(2, *grow, lr=0.5)], **options)
    train(model, optimizer, 0)
    run.step()
    return model, optimizer, run


DOUBLE = outgrow.Widen("blocks.0.up", factor=2)
CASES: dict[str, tuple[Any, Callable[[nn.Module], None], type[Exception], str]] = {
    "another method": (DOUBLE, becomes(Normed, "blocks.0"), VerifyError, "now be another: blocks.0.up: 8 → 16 by mean"),
    "no such method": (
        WIDEN,
        becomes(Normed, "blocks.0"),
        VerifyError,
        r"(?s)not possible.*leave it out.*blocks.0.up: r2r: the",
    ),
    "a size in the code": (
        WIDEN,
        becomes(Sized, "blocks.0"),
        ApplyError,
        "(?s)not possible any more.*does not follow its size",
    ),
    "blocks in the code": (DEEPEN, becomes(Unrolled), VerifyError, "(?s)not possible any more.*does not run a block that is"),
    "no attribute": (WIDEN, without_sizes, ApplyError, "now be another: blocks.0.up: 8 → 12 by r2r"),
}


@pytest.mark.parametrize("check", [True, "full"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_for_other_code_is_refused_with_a_way_out(case: str, check: Any) -> None:
    grow, change, kind, reason = CASES[case]
    model, optimizer, run = in_training(grow, check=check)
    change(model)
    train(model, optimizer, 1)
    before = facts(model, [optimizer]), copy.deepcopy(run.position())
    with pytest.raises(kind, match=r"^the model's code has changed since the run was made") as caught:
        run.step()
    assert_equal((facts(model, [optimizer]), run.position()), before)
    caught.match(reason)
    caught.match(r"position = run\.position\(\); run = outgrow\.Run\(.*position=position\); run\.go_to\(position\)")


@pytest.mark.parametrize("case", ["another method", "no attribute"])
def test_the_way_out_works(case: str) -> None:
    grow, change, *_ = CASES[case]
    model, optimizer, run = in_training(grow)
    change(model)
    train(model, optimizer, 1)
    with pytest.raises(outgrow.GrowthError):
        run.step()
    outputs = model(X)
    position = run.position()
    run = started(model, optimizer, run.schedule, position=position)
    run.go_to(position)
    assert run.step() is not None
    assert model.blocks[0].up.weight.shape[0] > 8
    assert torch.allclose(model(X), outputs, rtol=0, atol=1e-12)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3]


def test_an_error_that_a_new_plan_does_not_avoid_is_reported_unchanged() -> None:
    model, optimizer, run = in_training(DEEPEN)
    becomes(Counting)(model)
    train(model, optimizer, 1)
    with pytest.raises(VerifyError, match=r"(?s)^the grown model differs from the old one.*the number of blocks"):
        run.step()
    assert len(model.blocks) == 2
