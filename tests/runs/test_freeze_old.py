"""`freeze="old"`: only what the newest growth has added is trained, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow import At, Deepen, Widen


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def build(kind: Any = torch.optim.AdamW) -> tuple[Blocks, Any]:
    torch.manual_seed(0)
    model = Blocks()
    return model, kind(model.parameters(), lr=0.05, weight_decay=0.1)


def train(model: nn.Module, optimizer: Any, run: outgrow.Run, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model(X) - X[:, :1]).square().mean().backward()
        optimizer.step()
        run.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_old_blocks_stay_and_new_ones_learn(kind: Any) -> None:
    model, optimizer = build(kind)
    run = outgrow.Run(model, X, optimizer, [At(step=2, grow=[Deepen(layers=3)])], quiet=True, freeze="old")
    train(model, optimizer, run, 2)
    assert model.blocks[0].up.weight.requires_grad == run.model.blocks[0].up.weight.requires_grad
    before = values(model)
    train(model, optimizer, run, 3)
    new = set(outgrow.grow(copy.deepcopy(model), X, Deepen(layers=4)).new_parameters)
    assert len(new) == 6
    changed = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert len({name.rpartition(".")[0].rpartition(".")[0] for name in changed}) == 1  # one block
    assert len(changed) == 6
    run.unfreeze()
    assert all(parameter.requires_grad for parameter in model.parameters())
    train(model, optimizer, run, 1)
    assert not torch.equal(model.stem.weight, before["stem.weight"])


def test_old_entries_of_grown_tensors_stay_too() -> None:
    model, optimizer = build()
    grow = [Widen("blocks.0.*", by=4), Widen("head", kind="outputs", by=2)]
    run = outgrow.Run(model, X, optimizer, [At(step=2, grow=grow)], quiet=True, freeze="old")
    train(model, optimizer, run, 2)
    before = values(model)
    train(model, optimizer, run, 3)
    after = values(model)
    for name, old in (("blocks.0.up.weight", 12), ("head.weight", 3), ("head.bias", 3)):
        assert torch.equal(after[name][:old], before[name][:old])
        assert not torch.equal(after[name][old:], before[name][old:])
    assert torch.equal(after["blocks.0.down.weight"][:, :12], before["blocks.0.down.weight"][:, :12])
    assert torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])
    assert model.blocks[1].up.weight.grad is None


def test_a_second_growth_freezes_the_blocks_of_the_first() -> None:
    model, optimizer = build()
    schedule = [At(step=1, grow=[Deepen("blocks.1")]), At(step=3, grow=[Deepen("blocks.2")])]
    run = outgrow.Run(model, X, optimizer, schedule, quiet=True, freeze="old")
    train(model, optimizer, run, 3)
    before = values(model)
    train(model, optimizer, run, 2)
    changed = {name for name, value in values(model).items() if not torch.equal(value, before[name])}
    assert {name[:9] for name in changed} == {"blocks.3."}


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Any) -> None:
    def run_of() -> tuple[Blocks, Any, outgrow.Run]:
        model, optimizer = build()
        model.stem.bias.requires_grad_(False)  # the user's own
        schedule = [At(step=2, grow=[Deepen("blocks.1"), Widen("blocks.0.*", by=4)])]
        return model, optimizer, outgrow.Run(model, X, optimizer, schedule, quiet=True, freeze="old")

    whole, again = run_of(), run_of()
    train(*whole, 4)
    whole[2].save(tmp_path / "run.pt")
    again[2].load(tmp_path / "run.pt")
    for model, optimizer, run in (whole, again):
        train(model, optimizer, run, 3)
        assert not model.stem.weight.requires_grad
        run.unfreeze()
        assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["stem.bias"]
    assert all(torch.equal(value, again[0].state_dict()[name]) for name, value in whole[0].state_dict().items())


def test_a_model_that_has_grown_before_the_run_is_frozen_from_the_start() -> None:
    model, optimizer = build()
    growth = outgrow.grow(model, X, Deepen("blocks.0"), optimizer=optimizer)
    run = outgrow.Run(model, X, optimizer, [], quiet=True, freeze="old")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert (
        trained == set(growth.new_parameters) == {name for name, _ in model.named_parameters() if name.startswith("blocks.1.")}
    )
    train(model, optimizer, run, 2)
    assert {name for name, parameter in model.named_parameters() if parameter in optimizer.state} == trained


def test_mistakes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    with pytest.raises(outgrow.GrowthError, match="freeze='new': write 'old'"):
        outgrow.Run(model, X, optimizer, [], freeze="new")
    monkeypatch.setattr("outgrow.runs.freeze_old._several_processes", lambda: True)
    with pytest.raises(outgrow.GrowthError, match="for one process"):
        outgrow.Run(model, X, optimizer, [], freeze="old")
