"""Images on the device; batches are cut out, mirrored and covered there, by a table that is drawn on the host.

Each epoch has one table, (step, 6, sample), which follows from a seed and the number of the epoch alone: a training that was
interrupted goes on with the same batches. The six are the number of an image, the row and the column at which it is cut out,
whether it is mirrored, and the row and the column of the middle of a square that is set to zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.setting.data import Data, batches

BATCH = 512
FAR = 1 << 20  # where the middle of a square lies that covers nothing


@dataclass(frozen=True)
class Images:
    """Normalised images. padded: (number, row, column, channel), with zeros around each image, an eighth of its size."""

    padded: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def of(data: Data, device: str) -> Images:
        mean, deviation = (values.to(device)[:, None, None] for values in (data.mean, data.deviation))

        def normalised(images: Tensor) -> Tensor:
            return (images.to(device).float() / 255 - mean) / deviation

        padded = F.pad(normalised(data.images), (data.images.shape[-1] // 8,) * 4).permute(0, 2, 3, 1).contiguous()
        test = normalised(data.test_images).contiguous(memory_format=torch.channels_last)
        return Images(padded, data.labels.to(device), test, data.test_labels.to(device))

    @property
    def pixels(self) -> int:
        return self.test_x.shape[-1]

    @property
    def batch(self) -> int:
        return min(BATCH, len(self.y) // 4)

    @property
    def steps(self) -> int:
        """Of an epoch; the last images of a shuffle, less than a batch, are left out."""
        return len(self.y) // self.batch

    @property
    def per_epoch(self) -> int:
        """Images that an epoch trains on."""
        return self.steps * self.batch

    def table(self, seed: int, epoch: int, covers: bool) -> Tensor:
        """The table of an epoch, on the host. covers: whether squares are set to zero."""
        order, mirrored = batches(seed, epoch, len(self.y), self.batch, self.steps)
        generator = torch.Generator().manual_seed(1_000_003 * seed + epoch + 500_000_000)
        most, size = 2 * (self.pixels // 8) + 1, self.pixels
        places = [torch.randint(high, order.shape, generator=generator) for high in (most, most, size, size)]
        row, column, *middle = places
        return torch.stack(
            [order, row, column, mirrored.long(), *(m if covers else torch.full_like(m, FAR) for m in middle)], 1
        )

    def taken(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels of a step, with their channels last in memory. table: (6, sample)."""
        number, row, column, mirrored, *middle = table.unbind()
        along = torch.arange(self.pixels, device=table.device)
        rows = row[:, None] + along
        columns = column[:, None] + torch.where(mirrored[:, None] > 0, self.pixels - 1 - along, along)
        found = self.padded[number[:, None, None], rows[:, :, None], columns[:, None, :]]
        covered = [(at[:, None] - along).abs() <= self.pixels // 8 for at in middle]
        found = found.masked_fill((covered[0][:, :, None] & covered[1][:, None, :])[..., None], 0.0)
        return found.permute(0, 3, 1, 2), self.y[number]
