"""Accelerate: save_state and load_state include growths, and a loaded run continues bit for bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import outgrow
import outgrow.integrations.accelerate
from tests.helpers.training_run import Block, Net, assert_equal

STEPS = 18


class Longer:
    """A user's registered object: its file is written after outgrow's, and is longer each time."""

    def __init__(self) -> None:
        self.past: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        self.past += range(1000)
        return {"past": self.past}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.past = state["past"]


class Trial:
    """A loop with Accelerate, with gradient accumulation, clipping, dropout and a schedule, and a newly built small model."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
        model = Net()
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.ndim > 1]},
                {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.data = torch.randn(32, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(2))
        schedule = [
            outgrow.At(step=4, grow=[outgrow.Widen("*", factor=1.5, fade=6)], lr=0.5, new_lr=1.3, warmup=4),
            outgrow.At(epoch=2, grow=[outgrow.Deepen("blocks.0", fade=5)]),
            outgrow.At(step=13, grow=[outgrow.Kernel("stem.0", 5)]),
        ]
        self.run = outgrow.Run(self.model, self.data[:4], self.optimizer, schedule, self.scheduler, quiet=True)
        outgrow.accelerate.attach(self.run, self.accelerator)
        self.accelerator.register_for_checkpointing(Longer())

    def go(self, until: int = STEPS) -> Trial:
        self.model.train()
        while self.run.steps < until:
            for _ in range(2):
                with self.accelerator.accumulate(self.model):
                    pick = torch.randint(0, len(self.data), (8,))
                    loss = nn.functional.cross_entropy(self.model(self.data[pick]), self.labels[pick])
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            self.run.step(loss)
            if self.run.steps % 5 == 0:
                self.run.epoch({"loss": loss.item()})
        return self

    def state(self) -> dict[str, Any]:
        position = self.run.position()
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "run": {key: position[key] for key in ("steps", "epochs", "done", "pace", "metrics")},
            "random": torch.get_rng_state(),
        }


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Before, between and after growths, and within a fade; each time from a run that was itself resumed."""
    whole = Trial().go()
    assert len(whole.run.done) == 3
    part = Trial()
    for until in (2, 6, 12, 15):
        part.go(until).accelerator.save_state(str(tmp_path / str(until)))
        again = Trial()
        torch.manual_seed(77)  # the random state of the new process must not matter
        again.accelerator.load_state(str(tmp_path / str(until)))
        assert_equal(again.state(), part.state())
        part = again
    assert_equal(part.go().state(), whole.state())


def test_checkpoints_that_accelerate_names_are_found(tmp_path: Path) -> None:
    settings = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    one = Trial(project_config=settings).go(6)
    one.accelerator.save_state()
    two = Trial(project_config=settings)
    two.accelerator.load_state()
    assert_equal(two.state(), one.state())


def test_a_refused_folder_changes_nothing(tmp_path: Path) -> None:
    one = Trial().go(6)
    one.accelerator.save_state(str(tmp_path))
    two = Trial()
    two.model.blocks = nn.Sequential(Block(6))
    before = {name: value.clone() for name, value in two.model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match="does not fit this model"):
        two.accelerator.load_state(str(tmp_path))
    assert_equal(dict(two.model.state_dict()), before)
    assert two.run.steps == 0


def test_an_incompletely_written_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second save into the same folder fails half-way: the folder holds neither the old state nor the new one."""
    trial = Trial().go(6)
    trial.accelerator.save_state(str(tmp_path))
    trial.go(8)

    def fail(*args: object, **options: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trial.scheduler, "state_dict", fail)
        with pytest.raises(OSError, match="no space left"):
            trial.accelerator.save_state(str(tmp_path))
    with pytest.raises(outgrow.GrowthError, match=r"has no outgrow\.pt"):
        Trial().accelerator.load_state(str(tmp_path))
    trial.accelerator.save_state(str(tmp_path))
    again = Trial()
    again.accelerator.load_state(str(tmp_path))
    assert_equal(again.state(), trial.state())
    os.truncate(tmp_path / "scheduler.bin", 10)
    with pytest.raises(outgrow.GrowthError, match=r"scheduler\.bin is 10 bytes"):
        Trial().accelerator.load_state(str(tmp_path))


def test_each_of_several_models_has_its_own_file(tmp_path: Path) -> None:
    def make() -> tuple[accelerate.Accelerator, list[outgrow.Run]]:
        accelerator = accelerate.Accelerator(cpu=True)
        runs = []
        for size in (8, 12):
            model = nn.Sequential(nn.Linear(4, size), nn.ReLU(), nn.Linear(size, 2))
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            schedule = [outgrow.At(step=1, grow=[outgrow.Widen("0", factor=2)])]
            runs.append(outgrow.Run(model, torch.zeros(1, 4), optimizer, schedule, quiet=True))
            outgrow.accelerate.attach(runs[-1], accelerator)
        return accelerator, runs

    accelerator, runs = make()
    runs[1].step()
    accelerator.save_state(str(tmp_path))
    other, again = make()
    other.load_state(str(tmp_path))
    assert [run.model[0].out_features for run in again] == [8, 24]
    for one, two in zip(runs, again, strict=True):
        assert_equal(dict(two.model.state_dict()), dict(one.model.state_dict()))


def test_a_model_must_be_prepared_first() -> None:
    model = Net()
    run = outgrow.Run(model, torch.zeros(2, 1, 6, 6), torch.optim.SGD(model.parameters(), lr=0.1), [], quiet=True)
    with pytest.raises(outgrow.GrowthError, match="prepare"):
        outgrow.accelerate.attach(run, accelerate.Accelerator(cpu=True))


def test_a_missing_library_is_reported_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outgrow.integrations.accelerate")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(outgrow.GrowthError, match=r"pip install outgrow\[accelerate\]"):
        __import__("outgrow.integrations.accelerate")
