"""Gains of new blocks against blocks that are put in by hand and trained for one small step."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from outgrow.scoring.ranking import PlaceScore

torch.manual_seed(0)
BATCHES = [(torch.randn(16, 6).double(), torch.randn(16, 3).double()) for _ in range(2)]
RATE = 1e-5


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


def whole_loss(model: nn.Module) -> Tensor:
    return torch.stack([squares(model, batch) for batch in BATCHES]).mean()


class Block(nn.Module):
    def __init__(self, post: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.post = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), post

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            result: Tensor = self.norm(x + self.down(self.up(x).relu()))
            return result
        return x + self.down(self.up(self.norm(x)).relu())


def network(post: bool = False) -> nn.Sequential:
    torch.manual_seed(2)
    blocks = nn.Sequential(*(Block(post) for _ in range(3)))
    return nn.Sequential(nn.Linear(6, 8), blocks, nn.Linear(8, 3)).double()


def test_the_gain_is_the_decrease_of_the_loss_per_rate_behind_each_block() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    found = outgrow.scores(model, BATCHES, squares)
    assert sorted(score.place for score in found.places) == ["1", "1.0", "1.1", "1.2"]
    for number in range(3):
        grown = copy.deepcopy(model)
        block = copy.deepcopy(grown[1][number])  # type: ignore[index]
        nn.init.zeros_(block.down.weight), nn.init.zeros_(block.down.bias)
        grown[1].insert(number + 1, block)  # type: ignore[operator]
        loss = whole_loss(grown)
        trained = [block.down.weight, block.down.bias]
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter -= RATE * gradient
            measured = float(loss - whole_loss(grown)) / RATE
        score = found[f"1.{number}"]
        assert isinstance(score, PlaceScore)
        assert score.gain == pytest.approx(measured, rel=1e-3)
        assert score.zeroed == ("down.bias", "down.weight")
        with FlopCounterMode(display=False) as counter:
            block(torch.zeros(16, 8).double())
        assert score.flops == counter.get_total_flops()
    stage = found["1"]  # a copy of all blocks
    assert isinstance(stage, PlaceScore)
    assert (stage.flops, len(stage.zeroed)) == (3 * score.flops, 6)
    assert found.best_place == found.places[0].place
    assert [score.gain_per_flop for score in found.places] == sorted((s.gain_per_flop for s in found.places), reverse=True)
    assert f"behind {found.best_place} " in str(found)
    assert json.loads(json.dumps(found.to_json()))["places"][0]["gain_per_flop"] == found.places[0].gain_per_flop
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_blocks_that_are_not_the_identity_have_a_reason() -> None:
    found = outgrow.scores(network(post=True), BATCHES, squares)
    assert not found.places
    assert sorted(found.refused_places) == ["1.0", "1.1", "1.2"]
    assert "behind 1.0: " in str(found)
    with pytest.raises(outgrow.GrowthError, match=r"no place has a score: 1\.0: "):
        print(found.best_place)
    plain = outgrow.scores(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double(), BATCHES, squares)
    with pytest.raises(outgrow.GrowthError, match="no blocks that could be copied"):
        print(plain.best_place)
