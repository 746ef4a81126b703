"""Batches of images that depend on nothing but a seed and the number of the step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.setting.data import COLOURS

PAD = 4


class Batches:
    """Batches of shifted and mirrored images, all on one device: `batches(step)` is the same for everyone who asks."""

    def __init__(self, images: Tensor, labels: Tensor, size: int, seed: int, device: str = "cpu") -> None:
        self.images = F.pad(images.to(device), (PAD,) * 4)
        self.labels = labels.to(device)
        self.size, self.seed, self.device = size, seed, device
        self.mean, self.deviation = (255 * torch.tensor(row, device=device).view(3, 1, 1) for row in COLOURS)
        self.grid = torch.arange(images.shape[-1], device=device)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    @property
    def per_epoch(self) -> int:
        return len(self.labels) // self.size

    def _epoch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """The order of an epoch's images; where each is cut out (image, down and right); which are mirrored."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        order = torch.randperm(len(self.labels), generator=generator)
        shifts = torch.randint(2 * PAD + 1, (len(order), 2), generator=generator)
        mirrored = torch.rand(len(order), generator=generator) < 0.5
        return order.to(self.device), shifts.to(self.device), mirrored.to(self.device)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, self.per_epoch)
        order, shifts, mirrored = (part[place * self.size : (place + 1) * self.size] for part in self.epoch(epoch))
        down = self.grid + shifts[:, :1]  # (image, row)
        right = torch.where(mirrored[:, None], self.grid.flip(0), self.grid) + shifts[:, 1:]  # (image, column)
        cut = self.images[order[:, None, None], :, down[:, :, None], right[:, None, :]]  # (image, row, column, colour)
        return (cut.permute(0, 3, 1, 2).contiguous() - self.mean) / self.deviation, self.labels[order]
