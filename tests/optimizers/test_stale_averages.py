"""An averaged copy that was left out of a growth is stopped before its next update; no other average is disturbed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outgrow
from outgrow.errors import StaleAverageError
from outgrow.optimizers.stale_averages import _WATCH
from tests.helpers.judging import shake

X = torch.randn(5, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), Block(), Block())


def timm_average(name: str) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(pytest.importorskip("timm.utils.model_ema"), name)(model)


def update(average: Any, model: nn.Module) -> None:
    (average.update_parameters if hasattr(average, "update_parameters") else average.update)(model)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "swa": AveragedModel,
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "buffers": lambda model: AveragedModel(model, use_buffers=True),
    **{name: timm_average(name) for name in ("ModelEma", "ModelEmaV2", "ModelEmaV3")},
}
GROWTHS: dict[str, Callable[..., Any]] = {
    "widen": lambda model, **more: outgrow.widen(model, X, "1.up", by=2, **more),
    "deepen": lambda model, **more: outgrow.deepen(model, X, "1", **more),
    "deepen at the end": lambda model, **more: outgrow.deepen(model, X, "2", **more),
}


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_average_that_was_left_out_is_not_updated(kind: str, growth: str) -> None:
    model = network()
    average = KINDS[kind](model)
    inner = average.ema if kind == "ModelEma" else average.module
    update(average, model)
    GROWTHS[growth](model)
    before = copy.deepcopy(inner.state_dict())
    with pytest.raises(StaleAverageError, match=rf"Make a new (.|\n)*outgrow\.{growth[:5]}\S*\(model, example, …, average="):
        update(average, model)
    assert all(torch.equal(before[name], value) for name, value in inner.state_dict().items())
    update(KINDS[kind](model), model)
    again = network()
    grown = KINDS[kind](again)
    GROWTHS[growth](again, average=grown.ema if kind == "ModelEma" else grown)
    update(grown, again)


def test_averages_of_other_models_and_of_parts_are_updated_as_before() -> None:
    """Among them averages whose update torch itself refuses, and one of a model that misses parameters from the start."""
    model, other = network(), network()
    part, first, bystander = AveragedModel(model[2]), AveragedModel(model[:2]), AveragedModel(other)
    outgrow.widen(model, X, "1.up", by=2)
    outgrow.deepen(model, X, "2", count=2)
    part.update_parameters(shake(model[2]))
    assert torch.equal(part.module.up.weight, model[2].up.weight)
    bystander.update_parameters(shake(other))
    assert torch.equal(bystander.module[1].up.weight, other[1].up.weight)
    unequal = AveragedModel(nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(RuntimeError, match="size"):
        unequal.update_parameters(other)
    with pytest.raises(StaleAverageError):
        first.update_parameters(model)
    beginning = AveragedModel(model[:1])  # torch pairs as many parameters as both have
    beginning.update_parameters(model)
    assert torch.equal(beginning.module[0].weight, model[0].weight)


def test_an_average_made_between_two_deepenings_is_stopped_after_the_second() -> None:
    model = network()
    outgrow.deepen(model, X, "1")
    average = AveragedModel(model)
    average.update_parameters(model)
    outgrow.deepen(model, X, "3")
    with pytest.raises(StaleAverageError, match=r"\(14 parameters, the model has 18\)"):
        average.update_parameters(model)


def test_the_watch_is_set_once_and_keeps_nothing_alive() -> None:
    gc.collect()
    before = len(_WATCH.changed), len(_WATCH.added)
    model = network()
    GROWTHS["widen"](model)
    GROWTHS["deepen"](model)
    method = AveragedModel.update_parameters
    GROWTHS["widen"](model)
    assert AveragedModel.update_parameters is method
    assert len(_WATCH.added) > before[1]
    del model
    gc.collect()
    assert (len(_WATCH.changed), len(_WATCH.added)) <= before
