"""Refusals of the Lightning callback before the first step, and a missing library."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging

import outgrow
from tests.helpers.lightning_fit import Fit, Lit, X, every, schedule
from tests.helpers.lightning_fit import pytestmark as pytestmark

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def refused(match: str, *callbacks: L.Callback, **options: Any) -> None:
    steps: list[int] = []

    class Count(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            steps.append(1)

    with pytest.raises(outgrow.GrowthError, match=match):
        Fit(*callbacks, Count(), **options)
    assert not steps


WIDEN = outgrow.At(step=2, grow=[outgrow.Widen("stem.0", by=2)])


class NoForward(Lit):
    forward = L.LightningModule.forward


def test_impossible_trainers_are_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    Grow = outgrow.lightning.Grow
    refused("it has no such module; it has model", grow=Grow([WIDEN], X[:4], module="net"))
    refused("StochasticWeightAveraging: it repl", StochasticWeightAveraging(1e-2), grow=Grow([WIDEN], X[:4], module="model"))
    monkeypatch.setattr("tests.helpers.lightning_fit.Lit", NoForward)
    refused(r"NoForward: it has no forward[\s\S]*module='model'", grow=Grow([WIDEN], X[:4]))


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("fsdp", r"FSDPStrategy: it shards[\s\S]*outgrow.shard"),
        ("ddp_spawn", r"'spawn': its processes[\s\S]*torchrun"),
        (L.pytorch.strategies.ModelParallelStrategy(), "ModelParallelStrategy: it shards"),
    ],
)
def test_strategies_that_shard_the_model_are_refused(strategy: Any, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if strategy == "ddp_spawn":
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, devices=2, logger=False, enable_checkpointing=False)
    else:  # these need accelerators that this machine does not have
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        kind = L.pytorch.strategies.FSDPStrategy() if strategy == "fsdp" else strategy
        monkeypatch.setattr(trainer._accelerator_connector, "strategy", kind)
    with pytest.raises(outgrow.GrowthError, match=match):
        outgrow.lightning.Grow([WIDEN], X[:4], module="model").setup(trainer, Lit(), "fit")


def test_a_dry_run_comes_before_the_first_step() -> None:
    nowhere = [outgrow.At(step=2, grow=[outgrow.Widen("stam.0", by=2)])]
    refused("no volume is called 'stam.0'", grow=outgrow.lightning.Grow(nowhere, X[:4], module="model"))
    refused("does not run on the example", grow=outgrow.lightning.Grow([WIDEN], torch.randn(2, 3, 6, 6), module="model"))


def test_shares_are_of_the_trainers_steps_and_need_a_limit() -> None:
    def grow() -> Any:
        return outgrow.lightning.Grow([outgrow.At(share=0.5, grow=WIDEN.grow)], X[:4], module="model", quiet=True)

    fit = Fit(grow=grow(), max_steps=6, max_epochs=2)
    assert [record.step for record in fit.grow.run.records] == [3]
    refused(r"length of the run is not known[\s\S]*max_epochs=", grow=grow(), max_steps=-1, max_epochs=-1)


def loaded_again() -> Any:
    spec = importlib.util.find_spec("outgrow.integrations.lightning.callback")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_either_name_of_lightning_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(outgrow.lightning.Grow, L.Callback)
    import pytorch_lightning as other

    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    grow = loaded_again().Grow([WIDEN], X[:4])
    assert isinstance(grow, other.Callback)
    assert not isinstance(grow, L.Callback)


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(outgrow.GrowthError, match=r"pip install outgrow\[lightning\]") as caught:
        loaded_again()
    assert isinstance(caught.value, ImportError)


def test_a_checkpoint_is_for_the_trainer_and_an_event_that_is_past_is_refused(tmp_path: Path) -> None:
    fit = Fit(every(1, tmp_path), max_steps=5)
    assert fit.grow.run is not None
    with pytest.raises(outgrow.GrowthError, match=r"Lightning checkpoint\. trainer\.fit\(model, ckpt_path=path\)"):
        fit.grow.run.load(tmp_path / "step5.ckpt")
    more = [*schedule().events[:1], outgrow.At(step=4, grow=[outgrow.Widen("stem.0", by=2)]), *schedule().events[1:]]
    refused("event 2 is past", path=tmp_path / "step5.ckpt", grow=outgrow.lightning.Grow(more, X[:4], module="model"))
