"""A Lightning run with growths: module, data, schedule and trainer in one object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import outgrow
from tests.helpers.training_run import Net

pytestmark = [
    pytest.mark.filterwarnings("ignore:training has ended during a fade"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*ended before the epoch ended and your dataloader is not resumable"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)"),
]
SIZE, BATCH, EPOCHS, PER_EPOCH = 48, 8, 4, 3  # two batches per step
X = torch.randn(SIZE, 1, 6, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 4, (SIZE,), generator=torch.Generator().manual_seed(2))
DATA = TensorDataset(X, Y)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1]},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=40)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler_of(optimizer), "interval": "step"}}


def schedule(prefix: str = "") -> outgrow.Schedule:
    return outgrow.Schedule(
        [
            outgrow.At(step=2, grow=[outgrow.Widen("*", factor=1.5)], lr=0.5),
            outgrow.When(
                outgrow.reached("val_loss", 9.0, "min"),
                grow=[outgrow.Widen(f"{prefix}blocks.*", factor=2, fade=3)],
                weight_decay=0.5,
            ),
            outgrow.At(epoch=2, grow=[outgrow.Deepen(f"{prefix}blocks.0", fade=4), outgrow.Kernel(f"{prefix}stem.0", 5)]),
            outgrow.At(step=11, grow=[outgrow.Deepen(f"{prefix}blocks.1")]),
        ]
    )


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, BATCH, shuffle=True)


class Fit:
    """A run with everything that makes resuming hard: two batches per step, dropout, clipping, a new rate at every step."""

    def __init__(
        self,
        *callbacks: L.Callback,
        grow: outgrow.lightning.Grow | None = None,
        loader: Callable[[], Any] = shuffled,
        path: Path | None = None,
        validate: bool = True,
        **options: Any,
    ) -> None:
        L.seed_everything(3 if path is None else 77, verbose=False)  # the random state of the new process must not matter
        self.model = Lit()
        self.grow = grow or outgrow.lightning.Grow(schedule(), X[:4], module="model")
        places = callbacks if self.grow in callbacks else (self.grow, *callbacks)
        settings: dict[str, Any] = {
            "max_epochs": EPOCHS,
            "logger": False,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            **options,
        }
        self.trainer = L.Trainer(
            accelerator="cpu",
            enable_model_summary=False,
            enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            callbacks=list(places),
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            **settings,
        )
        self.trainer.fit(self.model, loader(), DataLoader(DATA, 16) if validate else None, ckpt_path=path)

    def state(self) -> dict[str, Any]:
        """Everything that must be equal in two runs, i.e. without the seconds of growths."""
        position = self.grow.run.position() if self.grow.run else {}
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
                "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
                "position": {name: value for name, value in position.items() if name != "records"},
                "random": torch.get_rng_state(),
            }
        )


def every(number: int, folder: Path) -> ModelCheckpoint:
    name = "step{step}"
    return ModelCheckpoint(folder, name, auto_insert_metric_name=False, every_n_train_steps=number, save_top_k=-1)


def each_epoch(folder: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "epoch{epoch}", auto_insert_metric_name=False, save_top_k=-1, **options)
