"""A small real training run with three growths and everything that can follow one, for comparisons with resumed runs."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import outgrow

STEPS, PER_EPOCH, EVERY = 36, 6, 3


class Net(nn.Module):
    """Convolutions with batch norm and dropout, and residual blocks behind which more can be inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.blocks = nn.Sequential(Block(6), Block(6))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def schedule() -> outgrow.Schedule:
    return outgrow.Schedule(
        [
            outgrow.At(step=10, grow=[outgrow.Widen("*", factor=1.5)], lr=0.5, new_lr=1.3, warmup=4),
            outgrow.At(epoch=3, grow=[outgrow.Deepen("blocks.0", fade=7), outgrow.Kernel("stem.0", 5)], train="new", hold=3),
            outgrow.When(falls, grow=[outgrow.Widen("blocks.*", factor=2, fade=5)], weight_decay=0.5),
        ]
    )


def falls(past: Any) -> bool:
    return len(past) >= 2


class Trial:
    """The run, with a newly built small model."""

    def __init__(self, optimizer: str = "adamw", **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = Net()
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
            "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3, nesterov=True),
            "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        }
        named = list(self.model.named_parameters())
        groups = [
            {"params": [(n, p) for n, p in named if p.ndim > 1]},
            {"params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = kinds[optimizer](groups)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-2, total_steps=STEPS + 1)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        self.order = torch.Generator().manual_seed(5)
        self.data = torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(2))
        self.run = outgrow.Run(
            self.model,
            self.data[:4],
            self.optimizer,
            schedule(),
            self.scheduler,
            self.average,
            also={"order": self.order},
            quiet=True,
            **options,
        )

    def go(self, until: int = STEPS, path: Path | None = None, every: int = EVERY) -> Trial:
        """Continue training, with two batches per step; save after every few steps, and after epochs."""
        self.model.train()
        while self.run.steps < until:
            self.optimizer.zero_grad()
            for _ in range(2):
                pick = torch.randint(0, len(self.data), (8,), generator=self.order)
                loss = nn.functional.cross_entropy(self.model(self.data[pick]), self.labels[pick])
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            self.run.step(loss)
            if self.run.steps % PER_EPOCH == 0:
                self.run.epoch({"loss": loss.item()})
            if path is not None and self.run.steps % every == 0:
                self.run.save(path)
        return self

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.run.state_dict())


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Check that nested dicts and lists are equal bit for bit."""
    assert type(one) is type(other), (where, type(one), type(other))
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), f"{where}: {(one.double() - other.double()).abs().max()}"
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}/{number}")
    else:
        assert one == other or one != one, (where, one, other)


def without_times(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that must be equal in two runs: without the seconds of growths, and without the flag of unlogged ones."""
    position = {**state["outgrow"], "records": len(state["outgrow"]["records"])}
    return {**state, "outgrow": position}
