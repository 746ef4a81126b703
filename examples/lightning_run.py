"""Grow a network in the middle of a Lightning run, stop it, and go on from the checkpoint.

A small convolutional network learns scikit-learn's digits. It is widened after two epochs, and gets a new block, which fades
in, once it is right in four cases of five. The run ends early on purpose; a second trainer then resumes it from the *small*
constructor: the checkpoint knows how the model has grown.

    python examples/lightning_run.py

Needs lightning and scikit-learn.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import outgrow


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Digits(lightning.LightningModule):
    """A plain module: growth needs no code here."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * width, 10))
        self.net = nn.Sequential(stem, Block(width), head)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        scores = self(batch[0])
        self.log("val_loss", cross_entropy(scores, batch[1]))
        self.log("accuracy", (scores.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data() -> tuple[DataLoader[Any], DataLoader[Any]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    train, held_out = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))
    return DataLoader(train, 64, shuffle=True), DataLoader(held_out, 256)


def trainer(epochs: int, folder: str) -> tuple[lightning.Trainer, outgrow.lightning.Grow]:
    schedule = [
        outgrow.At(epoch=2, grow=[outgrow.Widen("net.*", factor=2)]),
        outgrow.When(outgrow.reached("accuracy", 0.8), grow=[outgrow.Deepen(after="net.1", fade=40)]),
    ]
    grow = outgrow.lightning.Grow(schedule, torch.randn(2, 1, 8, 8))
    saves = ModelCheckpoint(folder, save_last=True)
    quiet = {"logger": False, "enable_model_summary": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[grow, saves], **quiet), grow


def main() -> None:
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    train, held_out = data()
    with tempfile.TemporaryDirectory() as folder:
        first, _ = trainer(6, folder)
        first.fit(Digits(), train, held_out)
        second, grow = trainer(12, folder)
        model = Digits()  # small, as it was at first
        second.fit(model, train, held_out, ckpt_path=f"{folder}/last.ckpt")
    assert grow.run is not None
    for number in grow.run.done:
        print(grow.run.schedule.events[number])
    small, big = (sum(parameter.numel() for parameter in one.parameters()) for one in (Digits(), model))
    print(f"{small:,} parameters became {big:,}")
    print(f"accuracy on digits that were held out: {float(second.callback_metrics['accuracy']):.1%}")


if __name__ == "__main__":
    main()
