"""CIFAR-10 from its official binary files, and batches of it that depend on nothing but a seed and the number of the step.

A record is 1 byte of label and 3072 bytes of image: 1024 red, 1024 green, 1024 blue, row by row
(www.cs.toronto.edu/~kriz/cifar).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

FOLDER = "cifar-10-batches-bin"
FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
RECORD = 1 + 3 * 32 * 32
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training set's red, green and blue
PAD = 4

HOW = f"""There is no CIFAR-10 in {{}}.
Download the binary version, cifar-10-binary.tar.gz, from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it there
(tar -xzf cifar-10-binary.tar.gz makes the folder {FOLDER}) and name that place with --data."""


def read_records(path: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 3, 32, 32) as bytes, and labels (n)."""
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % RECORD:
        raise ValueError(f"{path} is no file of CIFAR-10 records: its {len(data)} bytes are no multiple of {RECORD}")
    records = torch.from_numpy(data.reshape(-1, RECORD))
    return records[:, 1:].reshape(-1, 3, 32, 32).clone(), records[:, 0].long()


def read_cifar(folder: Path) -> tuple[Tensor, Tensor]:
    """The 50,000 training images and their labels."""
    place = next((place for place in (folder / FOLDER, folder) if all((place / name).exists() for name in FILES)), None)
    if place is None:
        raise SystemExit(HOW.format(folder))
    parts = [read_records(place / name) for name in FILES]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


class Batches:
    """Batches of shifted and mirrored images, all on one device: `batches(step)` is the same for everyone who asks."""

    def __init__(self, images: Tensor, labels: Tensor, size: int, seed: int, device: str = "cpu") -> None:
        self.images = F.pad(images.to(device), (PAD,) * 4)
        self.labels = labels.to(device)
        self.size, self.seed, self.device = size, seed, device
        self.mean, self.deviation = (255 * torch.tensor(row, device=device).view(3, 1, 1) for row in (MEAN, DEVIATION))
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
