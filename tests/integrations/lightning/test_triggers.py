"""Rules under the real Lightning: the metrics they read, and metrics that are lost when a run is resumed within an epoch."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

import outgrow
from tests.helpers.lightning_fit import EPOCHS, PER_EPOCH, Fit, Lit, X, each_epoch, every
from tests.helpers.lightning_fit import pytestmark as pytestmark

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def test_triggers_read_validation_metrics() -> None:
    seen: list[list[float]] = []

    def trigger(past: Any) -> bool:
        seen.append([metrics["val_loss"] for metrics in past])
        return len(past) == 2

    measured: list[float] = []

    class Measure(L.Callback):
        def on_validation_end(self, trainer: Any, model: Any) -> None:
            measured.append(float(trainer.callback_metrics["val_loss"]))

    grow = outgrow.lightning.Grow([outgrow.When(trigger, grow=[outgrow.Widen("stem.0", by=2)])], X[:4], "model", check=False)
    fit = Fit(Measure(), grow=grow)
    assert len(measured) == EPOCHS
    assert seen == [measured[:1], measured[:2]]
    assert fit.model.model.stem[0].out_channels == 8


class Mean(Lit):
    """A module that logs the mean of an epoch's losses at its end."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


def by_training(metric: str = "train_loss", *more: Any) -> outgrow.lightning.Grow:
    event = outgrow.When(outgrow.plateau(metric, patience=99), grow=[outgrow.Widen("stem.0", by=2)])
    return outgrow.lightning.Grow([*more, event], X[:4], "model", check=False)


@pytest.mark.parametrize("validate", [False, True])
def test_a_metric_that_is_lost_in_resuming_is_warned_of_once(
    validate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is from after the last batch: the epoch's mean is lost. Other events that are due are carried out."""
    monkeypatch.setattr("tests.helpers.lightning_fit.Lit", Mean)
    early = outgrow.At(epoch=1, grow=[outgrow.Widen("stem.0", by=2)])
    grow = by_training("train_loss", early)
    Fit(every(1, tmp_path), each_epoch(tmp_path), grow=grow, validate=validate)
    assert grow.run is not None
    assert len(grow.run.metrics) == EPOCHS - 1  # since the growth
    again = by_training("train_loss", early)
    with pytest.warns(UserWarning, match="'train_loss' is not known for epoch 1: .*skips this.*use validation") as found:
        fit = Fit(path=tmp_path / "step3.ckpt", grow=again, validate=validate)
    assert sum("is not known for epoch" in str(one.message) for one in found) == 1
    assert again.run is not None
    assert (again.run.epochs, again.run.done) == (EPOCHS, [0])
    assert fit.model.model.stem[0].out_channels == 8
    assert again.run.metrics == grow.run.metrics
    with warnings.catch_warnings():  # at the end of an epoch nothing is lost
        warnings.filterwarnings("error", ".*is not known for epoch")
        Fit(path=tmp_path / "epoch0.ckpt", grow=by_training("train_loss", early), validate=validate)


@pytest.mark.parametrize("epoch", [1, 2])
def test_the_trigger_skips_the_epoch(epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the previous epoch is not used for this one."""
    monkeypatch.setattr("tests.helpers.lightning_fit.Lit", Mean)
    grow, again = by_training(), by_training()
    Fit(every(1, tmp_path), grow=grow)
    with pytest.warns(UserWarning, match=f"'train_loss' is not known for epoch {epoch}"):
        Fit(path=tmp_path / f"step{epoch * PER_EPOCH}.ckpt", grow=again)
    assert grow.run is not None
    assert again.run is not None
    assert again.run.metrics == [*grow.run.metrics[: epoch - 1], *grow.run.metrics[epoch:]]


def test_a_metric_that_is_never_logged_is_an_error(tmp_path: Path) -> None:
    Fit(every(1, tmp_path), grow=by_training())
    with pytest.raises(outgrow.GrowthError, match=r"reads the metric 'loss', which was not measured \(measured: "):
        Fit(grow=by_training("loss"))
    with (
        pytest.warns(UserWarning, match="'loss' is not known for epoch 1"),
        pytest.raises(outgrow.GrowthError, match="reads the metric 'loss', which was not measured"),
    ):
        Fit(path=tmp_path / "step2.ckpt", grow=by_training("loss"))
