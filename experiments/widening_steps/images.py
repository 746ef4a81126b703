"""Images on the device; batches of them are cut out and mirrored there, by a table that is drawn on the host.

Every epoch of a seed has one table, the same on every machine and in every arm: (step, 4, image). The four are the number of an
image, the row and the column at which it is cut out, and whether it is mirrored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.setting.data import Data, batches
from experiments.widening_steps.arms import Setting


@dataclass(frozen=True)
class Images:
    """padded: (number, row, column, channel), normalised, with zeros around each image."""

    padded: Tensor
    labels: Tensor
    test: Tensor
    test_labels: Tensor
    pixels: int

    @staticmethod
    def of(data: Data, setting: Setting, device: str) -> Images:
        mean, deviation = (values.to(device)[:, None, None] for values in (data.mean, data.deviation))

        def normalised(images: Tensor) -> Tensor:
            return (images.to(device).float() / 255 - mean) / deviation

        padded = F.pad(normalised(data.images), (setting.pad,) * 4).permute(0, 2, 3, 1).contiguous()
        test = normalised(data.test_images)
        return Images(padded, data.labels.to(device), test, data.test_labels.to(device), setting.pixels)

    def batch(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Images with their channels last in memory, and labels; for the (4, image) table of a step."""
        number, row, column, mirrored = table.unbind()
        along = torch.arange(self.pixels, device=table.device)
        rows = row[:, None] + along
        columns = column[:, None] + torch.where(mirrored[:, None] > 0, self.pixels - 1 - along, along)
        found = self.padded[number[:, None, None], rows[:, :, None], columns[:, None, :]]
        return found.permute(0, 3, 1, 2), self.labels[number]


def table_of(setting: Setting, seed: int, epoch: int, number: int) -> Tensor:
    """The table of an epoch; the last images, less than a batch, are left out."""
    order, mirrored = batches(seed, epoch, number, setting.batch, number // setting.batch)
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch + 500_000_000)
    row, column = (torch.randint(2 * setting.pad + 1, order.shape, generator=generator) for _ in range(2))
    return torch.stack([order, row, column, mirrored.long() * setting.mirror], dim=1)
