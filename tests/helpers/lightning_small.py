"""A small Lightning module, its data and trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


class Lit(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self(batch[0]).square().mean()

    def test_step(self, batch: Any, number: int) -> None:
        self.log("width", float(self.model[0].out_features))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X), 4)


def trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    kept = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", **options}
    return L.Trainer(max_epochs=2, callbacks=list(callbacks), enable_checkpointing=kept, **settings)
