"""Scores against the decrease of the loss after one step, and what they leave alone."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

import outgrow
from outgrow.errors import GrowthError

torch.manual_seed(0)
BATCHES = [(torch.randn(32, 6).double(), torch.randn(32, 3).double()) for _ in range(2)]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    result: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


class PreNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def whole_loss(model: nn.Module) -> Tensor:
    return torch.stack([squares(model, batch) for batch in BATCHES]).mean()


def network(activation: type[nn.Module], seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = (6, 8, 12, 8, 4, 3)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1]).double()


def decrease(model: nn.Sequential, volume: str, new: int, method: outgrow.Method, rate: float) -> float:
    """By how much one step of gradient descent on the new units alone lowers the loss."""
    model = copy.deepcopy(model)
    old = int(model.get_submodule(volume).weight.shape[0])  # type: ignore[union-attr, index]
    outgrow.widen(model, BATCHES[0][0], volume, by=new, method=method)
    writer, reader = model.get_submodule(volume), model.get_submodule(str(int(volume) + 2))
    before = whole_loss(model)
    before.backward()
    with torch.no_grad():
        writer.weight[old:] -= rate * writer.weight.grad[old:]  # type: ignore[index, union-attr, operator]
        reader.weight[:, old:] -= rate * reader.weight.grad[:, old:]  # type: ignore[index, union-attr, operator]
        return float(before - whole_loss(model))


def test_the_gain_is_the_decrease_of_the_loss_per_rate() -> None:
    model = network(nn.Tanh)
    found = outgrow.scores(model, BATCHES, squares, factor=1.25)
    assert sorted(score.volume for score in found.volumes) == ["0", "2", "4", "6"]
    how = outgrow.NetMorph(zero="writers", init=outgrow.GradMax(BATCHES, squares))
    for score in found.volumes:
        assert score.new == {"0": 2, "2": 3, "4": 2, "6": 1}[score.volume]
        assert decrease(model, score.volume, score.new, how, 1e-5) / 1e-5 == pytest.approx(score.gain, rel=1e-3)


def test_scores_rank_volumes_as_pairs_under_a_relu_do() -> None:
    agree = 0
    how = outgrow.R2R(init=outgrow.GradMax(BATCHES, squares))
    for seed in range(3):
        model = network(nn.ReLU, seed)
        found = outgrow.scores(model, BATCHES, squares, factor=1.5)
        measured = {score.volume: decrease(model, score.volume, score.new // 2 * 2, how, 1e-3) for score in found.volumes}
        by_gain = sorted(found.volumes, key=lambda score: score.gain)
        order = [measured[score.volume] for score in by_gain]
        agree += sum(order[a] < order[b] for a in range(4) for b in range(a + 1, 4))
    assert agree >= 14  # of 18 pairs of volumes: a rank correlation above 0.5


def test_flops_are_those_of_the_grown_model_and_the_table_is_sorted_by_gain_per_flop() -> None:
    model, x = network(nn.ReLU), BATCHES[0][0]
    found = outgrow.scores(model, BATCHES, squares, factor=1.5)

    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            model(x)
        return int(counter.get_total_flops())

    for score in found.volumes:
        grown = copy.deepcopy(model)
        outgrow.widen(grown, x, score.volume, by=score.new, method="netmorph")
        assert flops(grown) - flops(model) == score.flops
    rates = [score.gain_per_flop for score in found.volumes]
    assert rates == sorted(rates, reverse=True)
    assert found.best == found.volumes[0].volume == str(found).splitlines()[2].split()[0]
    data = json.loads(json.dumps(found.to_json()))
    assert data["volumes"][0]["gain_per_flop"] == rates[0]
    assert found[found.best].rank <= found[found.best].size


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x = self.stem(x)
        result: Tensor = self.head(x + scale * self.down(self.drop(self.norm(self.up(x)).relu())))
        return result


def test_all_volumes_have_a_score_and_the_model_is_left_alone() -> None:
    model = Residual().double()
    model.drop.eval()
    state, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    found = outgrow.scores(model, BATCHES, lambda model, batch: (model(batch[0], scale=0.5) - batch[1]).square().mean())
    assert sorted(score.volume for score in found.volumes) == ["stem", "up"]
    assert not found.refused
    assert not found.places
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]


def test_wrong_arguments_are_refused() -> None:
    model = network(nn.ReLU)
    with pytest.raises(outgrow.GrowthError, match="write a number above 1"):
        outgrow.scores(model, BATCHES, squares, factor=1.0)
    with pytest.raises(outgrow.GrowthError, match="did not call the model"):
        outgrow.scores(model, BATCHES, lambda model, batch: batch[0].sum())
    with pytest.raises(TypeError, match=r"Write e.g. outgrow\.scores\("):
        outgrow.scores(model, BATCHES)  # type: ignore[call-arg]
    stream = outgrow.scores(nn.Linear(6, 3).double(), BATCHES, squares)
    with pytest.raises(outgrow.GrowthError, match="no volume has a score"):
        print(stream.best)


def test_a_loss_that_fails_is_reported_as_such() -> None:
    model = network(nn.ReLU)
    with pytest.raises(outgrow.GrowthError, match=r"loss\(model, batch\) failed with AttributeError"):
        outgrow.scores(model, BATCHES, nn.MSELoss())  # type: ignore[arg-type]
    with pytest.raises(outgrow.GrowthError, match="there are no batches"):
        outgrow.scores(model, [], squares)
    with pytest.raises(outgrow.GrowthError, match="has no gradient: use the model that it gets"):
        outgrow.scores(model, BATCHES, lambda model, batch: squares(model, batch).detach())
    with pytest.raises(outgrow.GrowthError, match="loss is of type list: pass a function"):
        outgrow.scores(model, BATCHES, BATCHES)  # type: ignore[arg-type]


def test_a_loader_that_shuffles_by_its_own_generator_is_left_where_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [(x, y) for batch in BATCHES for x, y in zip(*batch, strict=True)]
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=generator)
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(PreNorm(), PreNorm()), nn.Linear(8, 3)).double()
    before, everywhere = generator.get_state(), torch.get_rng_state()
    found = outgrow.scores(model, loader, squares)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), everywhere)
    assert {place.place for place in found.places} == {"1", "1.0", "1.1"}  # each pass has the same first batch


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    def infinite(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = (model(batch[0]) * 0).sqrt().sum()
        return result

    with pytest.raises(GrowthError, match=r"the gradient of loss.model, batch. at .* is not finite"):
        outgrow.scores(network(nn.Tanh), BATCHES, infinite)
    method = outgrow.R2R(init=outgrow.GradMax(BATCHES, infinite))
    with pytest.raises(GrowthError, match="is not finite: pass batches on which it is"):
        outgrow.widen(network(nn.Tanh), BATCHES[0][0], "0", by=2, method=method)


class Wrapper(nn.Module):
    """Passes on what it gets, as wrappers of other libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual().double()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = self.inner(*args, **kwargs)
        return y


def test_arguments_by_name_reach_a_forward_that_does_not_name_them() -> None:
    def named(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = (model(x=batch[0]) - batch[1]).square().mean()
        return result

    def mixed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        result: Tensor = (model(batch[0], scale=0.5) - batch[1]).square().mean()
        return result

    assert {score.volume for score in outgrow.scores(Wrapper(), BATCHES, named).volumes} == {"inner.stem", "inner.up"}
    with pytest.raises(GrowthError, match="to Wrapper, whose forward does not name all of them: pass example="):
        outgrow.scores(Wrapper(), BATCHES, mixed)
    assert outgrow.scores(Wrapper(), BATCHES, mixed, example=BATCHES[0][0]).volumes
