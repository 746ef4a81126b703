"""Short experiments on made-up data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.setting.arms import Arm
from experiments.setting.data import Data
from experiments.setting.segments import all_segments
from experiments.training.eager import Eager, shape_of
from experiments.training.store import Store
from experiments.training.train_segments import Training


def some_data(train: int = 16, test: int = 10) -> Data:
    generator = torch.Generator().manual_seed(0)

    def images(number: int) -> torch.Tensor:
        return torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=generator)

    def labels(number: int) -> torch.Tensor:
        return torch.randint(10, (number,), generator=generator)

    return Data(images(train), labels(train), images(test), labels(test), torch.full((3,), 0.5), torch.full((3,), 0.25))


def training(
    arms: list[Arm], folder: Path, data: Data, batch: int = 8, seeds: tuple[int, ...] = (0,), **options: Any
) -> Training:
    return Training(all_segments(arms, seeds), data, Eager, shape_of, Store(folder), batch=batch, **options)


def short(arm: Arm) -> Arm:
    return replace(arm, stages=tuple(replace(stage, epochs=1) for stage in arm.stages))
