"""Growth under the real Lightning: the run equals a plain loop, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import copy
import csv
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import outgrow
from tests.helpers.lightning_fit import (
    BATCH,
    DATA,
    EPOCHS,
    PER_EPOCH,
    SIZE,
    Fit,
    Lit,
    X,
    Y,
    each_epoch,
    every,
    optimizer_of,
    schedule,
    scheduler_of,
    shuffled,
)
from tests.helpers.lightning_fit import pytestmark as pytestmark
from tests.helpers.training_run import Net, assert_equal

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


WHEN = [2, 3, 6, 11]  # steps of these growths; the trigger applies at the end of the first epoch


def by_generator() -> DataLoader[Any]:
    return DataLoader(DATA, BATCH, shuffle=True, generator=torch.Generator().manual_seed(4))


class ByEpoch(Sampler[int]):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def by_epoch() -> DataLoader[Any]:
    return DataLoader(DATA, BATCH, sampler=ByEpoch())


class Watch(L.Callback):
    """Record the loss on a fixed batch, without dropout, and the model's size, after each optimizer step and each epoch."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    @property
    def state_key(self) -> str:
        return f"Watch{id(self)}"

    def record(self, when: str, model: nn.Module) -> None:
        model.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(X), Y).item()
        model.train()
        self.seen.setdefault(when, (loss, sum(parameter.numel() for parameter in model.parameters())))

    def on_train_batch_end(self, trainer: Any, model: Any, *rest: Any) -> None:
        self.record(f"step {trainer.global_step}", model)

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        self.record(f"epoch {trainer.current_epoch + 1}", model)


def test_growths_leave_the_loss_where_it_was() -> None:
    before, after = Watch(), Watch()
    grow = outgrow.lightning.Grow(schedule(), X[:4], module="model")
    fit = Fit(before, grow, after, grow=grow)
    grown = [when for when in before.seen if before.seen[when][1] != after.seen[when][1]]
    assert grown == ["step 2", "epoch 1", "epoch 2", "step 11"]
    for when, (loss, _) in before.seen.items():
        assert after.seen[when][0] == pytest.approx(loss, rel=1e-5), when
    (optimizer,), (config,) = fit.trainer.optimizers, fit.trainer.lr_scheduler_configs
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in fit.model.parameters()}
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in fit.model.parameters())
    untouched = scheduler_of(optimizer_of(Net()))
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # only a schedule, for its rates
        rates = [untouched.get_last_lr()[0] for _ in range(EPOCHS * PER_EPOCH) if untouched.step() is None]
    assert config.scheduler.get_last_lr()[0] == pytest.approx(rates[-1] / 2)


def test_the_run_equals_a_plain_loop() -> None:
    fit = Fit(loader=lambda: DataLoader(DATA, BATCH))
    L.seed_everything(3, verbose=False)
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer)
    run = outgrow.Run(model, X[:4], optimizer, schedule(), scheduler, quiet=True)
    torch.empty((), dtype=torch.int64).random_()  # a DataLoader draws this for its workers
    for _ in range(EPOCHS):
        for start in range(0, SIZE, 2 * BATCH):
            optimizer.zero_grad()
            for at in (start, start + BATCH):
                batch = slice(at, at + BATCH)
                (nn.functional.cross_entropy(model(X[batch]), Y[batch]) / 2).backward()
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)  # in that order
            optimizer.step()
            scheduler.step()
            run.step()
        run.epoch({"val_loss": 0.0})
        torch.empty((), dtype=torch.int64).random_(), torch.empty((), dtype=torch.int64).random_()  # validation, next epoch
    assert_equal(dict(fit.model.model.state_dict()), dict(model.state_dict()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """An uninterrupted run, and its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    state = Fit(every(1, folder), each_epoch(folder, save_last=True)).state()
    assert len(state["position"]["done"]) == len(WHEN)
    return state, folder


SAVED = ("step2", "step3", "step5", "step11", "epoch0", "epoch1")  # at growths, within a fade, and at the ends of epochs
MORE_SAVED = ("step1", "step6", "step9", "epoch2")


@pytest.mark.parametrize("name", [*SAVED, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_SAVED)])
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, whole: tuple[dict[str, Any], Path]) -> None:
    state, folder = whole
    assert_equal(Fit(path=folder / f"{name}.ckpt").state(), state)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_validation_that_was_still_to_come_is_made(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Lightning skips it if it resumes after an epoch's last batch. Progress bars are enabled."""
    seen: list[tuple[int, int, float]] = []

    class Measure(L.Callback):
        def on_validation_end(self, trainer: Any, model: Any) -> None:
            seen.append((trainer.current_epoch, trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    state, folder = whole
    Fit(Measure())
    first, seen[:] = list(seen), []
    then = each_epoch(tmp_path, save_on_train_epoch_end=False)  # i.e. after the validation
    again = Fit(Measure(), RichProgressBar(), then, path=folder / "step3.ckpt", enable_progress_bar=True)
    assert seen == first
    assert_equal(again.state(), state)
    assert_equal(Fit(path=tmp_path / "epoch0.ckpt").state(), state)


def test_a_finished_run_is_loaded_and_saved_as_it_was(whole: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, folder = whole
    fit = Fit(path=folder / "last.ckpt")
    fit.trainer.save_checkpoint(tmp_path / "again.ckpt")
    one, other = (torch.load(path, weights_only=True) for path in (folder / "last.ckpt", tmp_path / "again.ckpt"))
    assert_equal(other["outgrow"]["position"], one["outgrow"]["position"])
    assert_equal(other["state_dict"], one["state_dict"])
    assert len(one["outgrow"]["position"]["done"]) == len(WHEN)


@pytest.mark.parametrize("loader", [by_generator, by_epoch])
def test_the_order_of_batches_is_kept_however_it_is_made(loader: Callable[[], Any], tmp_path: Path) -> None:
    state = Fit(every(8, tmp_path), loader=loader, validate=False, grow=early()).state()
    resumed = Fit(path=tmp_path / "step8.ckpt", loader=loader, validate=False, grow=early())
    assert_equal(resumed.state(), state)


def early() -> outgrow.lightning.Grow:
    """The LightningModule itself grows: names refer to it."""
    events = [
        outgrow.At(step=1, grow=[outgrow.Widen("model.stem.0", by=2)]),
        outgrow.At(step=6, grow=[outgrow.Deepen("model.blocks.1", fade=9)]),
    ]
    return outgrow.lightning.Grow(events, X[:4], check=False)


def test_a_run_that_ends_after_some_steps_is_resumed_too(tmp_path: Path) -> None:
    limit = {"max_epochs": -1, "max_steps": 10}
    whole = Fit(each_epoch(tmp_path), grow=early(), **limit).state()
    assert_equal(Fit(path=tmp_path / "epoch1.ckpt", grow=early(), **limit).state()["model"], whole["model"])


@pytest.mark.parametrize("first", [True, False])
def test_an_average_follows(first: bool, tmp_path: Path) -> None:
    """Lightning replaces the model by the average at the end, and in the state dict of checkpoints."""

    def fit(path: Path | None = None, *more: L.Callback) -> Fit:
        average, grow = EMAWeightAveraging(decay=0.9), early()
        order = (average, grow) if first else (grow, average)
        return Fit(*order, *more, grow=grow, path=path)

    whole = fit(None, every(5, tmp_path), each_epoch(tmp_path))
    assert sum(p.numel() for p in whole.model.parameters()) > sum(p.numel() for p in Lit().parameters())
    for name in ("step5", "epoch1"):  # before and within a fade
        assert_equal(fit(tmp_path / f"{name}.ckpt").state(), whole.state())
    stored = torch.load(tmp_path / "epoch3.ckpt", weights_only=True)["state_dict"]
    assert_equal({name: stored[name] for name in whole.model.state_dict()}, dict(whole.model.state_dict()))


def test_the_average_equals_one_by_hand() -> None:
    """For the unit that exists from the start; a growth does not change its weights."""
    kept: list[Tensor] = []

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, number: int) -> None:
            if number % 2:
                kept.append(model.model.stem[0].weight[0].detach().clone())

    fit = Fit(Note(), EMAWeightAveraging(decay=0.9), grow=early())
    average = kept[0]
    for weight in kept[1:]:
        average = 0.9 * average + 0.1 * weight
    assert torch.allclose(fit.model.model.stem[0].weight[0], average, atol=1e-6)


def test_a_checkpoint_is_loaded_without_a_trainer(tmp_path: Path) -> None:
    fit = Fit(each_epoch(tmp_path, save_weights_only=True), grow=early())
    fit.trainer.save_checkpoint(tmp_path / "end.ckpt")
    for name in ("epoch3.ckpt", "end.ckpt"):
        model = outgrow.lightning.load(Lit(), tmp_path / name)
        assert_equal(dict(model.state_dict()), dict(fit.model.state_dict()))
        assert torch.equal(model.eval()(X), fit.model.eval()(X))  # the gate of a fade is restored
    other = nn.Sequential(nn.Linear(2, 2))
    other.on_load_checkpoint = lambda checkpoint: None  # type: ignore[assignment]
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(outgrow.GrowthError, match="does not fit this model"):
        outgrow.lightning.load(other, tmp_path / "end.ckpt")
    assert_equal(dict(other.state_dict()), dict(before))
    fresh = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False, callbacks=[early()]
    )
    (result,) = fresh.validate(Lit(), DataLoader(DATA, 16), tmp_path / "end.ckpt", verbose=False)
    assert result["val_loss"] == pytest.approx(float(fit.trainer.callback_metrics["val_loss"]))


def test_a_second_fit_continues_the_first() -> None:
    grow = early()
    fit = Fit(grow=grow, max_epochs=1)
    assert grow.run is not None
    assert len(grow.run.done) == 1
    fit.trainer.fit_loop.max_epochs = 3
    fit.trainer.fit(fit.model, shuffled(), DataLoader(DATA, 16))
    assert (grow.run.done, grow.run.steps, grow.run.epochs) == ([0, 1], 9, 3)


def test_a_logger_gets_each_growth(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    Fit(grow=early(), logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    usual = {"step", "epoch", "train_loss", "val_loss"}
    logged = [int(row["step"]) for row in rows if any(value for name, value in row.items() if name not in usual)]
    assert len(logged) == 2
    assert logged[0] in (0, 1, 2)
    assert logged[1] in (5, 6, 7)
