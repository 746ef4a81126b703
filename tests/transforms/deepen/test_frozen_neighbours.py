"""New blocks beside frozen ones are trained."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import shake
from tests.helpers.residual_chain import Block, X, chain

LEARNS = "the new block learns, although the block that it copies is frozen"


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(X).square().sum().backward()
    optimizer.step()


def test_a_new_block_in_a_frozen_backbone_learns_and_the_rest_stays_as_it_is() -> None:
    model = chain(Block(), Block())
    freeze(model[0])
    freeze(model[2])
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.01)
    growth = outgrow.deepen(model, X, "2.1", optimizer=optimizer)
    assert f"2: {LEARNS}" in str(growth).splitlines()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        step(model, optimizer)
    moved = {name.rpartition(".")[0] for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"2.2.a", "2.2.b", "3"}
    assert len({id(p) for group in optimizer.param_groups for p in group["params"]}) == 6


def test_weights_and_biases_join_the_groups_of_their_like() -> None:
    model = chain(Block(), Block())
    freeze(model[2])
    decayed, plain = ([p for p in model.parameters() if p.requires_grad and (p.ndim > 1) == many] for many in (True, False))
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}])
    outgrow.deepen(model, X, "2.1", optimizer=optimizer)
    assert [[p.ndim for p in group["params"]] for group in optimizer.param_groups] == [[2] * 4, [1] * 4]


def test_a_block_that_is_frozen_in_part_is_copied_as_it_is() -> None:
    model = chain(Block(), Block())
    for block in model[2]:
        freeze(block.a)
    growth = outgrow.deepen(model, X, "2.1")
    assert [p.requires_grad for p in model[2][2].parameters()] == [False, False, True, True]
    assert LEARNS not in str(growth)


def test_an_average_stays_frozen() -> None:
    model = chain(Block(), Block())
    average = copy.deepcopy(model)
    freeze(average)
    outgrow.deepen(model, X, "2.1", average=average)
    assert not any(p.requires_grad for p in average.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_a_refusal_thaws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(Block(), Block())
    freeze(model)

    def fail(*_: object) -> None:
        raise outgrow.GrowthError("no")

    monkeypatch.setattr("outgrow.verify.outputs.check", fail)
    with pytest.raises(outgrow.GrowthError, match="no"):
        outgrow.deepen(model, X, "2.1")
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("fade", [None, 5])
def test_a_branch_beside_a_frozen_stage_learns(fade: int | None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage, self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stage(x))

    model = shake(Net().double())
    freeze(model.stage)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    growth = outgrow.branch(model, X, "stage", fade=fade, optimizer=optimizer)
    assert f"beside stage: {LEARNS}" in str(growth).splitlines()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        step(model, optimizer)
    moved = {name.rpartition(".")[0] for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {"stage.1.0", "stage.1.2", "head"}
