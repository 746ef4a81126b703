"""Training of one trial: some epochs with flips and crops, the rate on a cosine from its maximum to zero.

The final training also cuts out squares and smooths labels, which helps long trainings and harms brief ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.setting.data import Data

BATCH, RATE, DECAY = 512, 0.2, 5e-4
SMOOTHING = 0.1  # of labels in the final training


@dataclass(frozen=True)
class Images:
    """Training and evaluation images on a device, normalised."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def of(data: Data, device: str) -> Images:
        def ready(images: Tensor) -> Tensor:
            shape = (1, -1, 1, 1)
            return ((images.to(device).float() / 255) - data.mean.to(device).view(shape)) / data.deviation.to(device).view(
                shape
            )

        test = ready(data.test_images), data.test_labels.to(device)
        return Images(ready(data.images), data.labels.to(device), *test)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=DECAY, nesterov=True)


def train_epoch(model: nn.Module, optimizer: Any, images: Images, epoch: int, epochs: int, final: bool = False) -> None:
    """One epoch of `epochs` on the cosine. final: with squares cut out and smoothed labels."""
    channels_last(model, optimizer)
    model.train()
    order = torch.randperm(len(images.y), device=images.y.device)
    batches = [batch for batch in order.split(min(BATCH, len(order) // 4)) if len(batch) > 1]
    for number, batch in enumerate(batches):
        share = (epoch + number / len(batches)) / epochs
        for group in optimizer.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * share))
        optimizer.zero_grad()
        x = changed(images.x[batch])
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            outputs = model(cut_out(x) if final else x)
            loss = F.cross_entropy(outputs, images.y[batch], label_smoothing=SMOOTHING if final else 0.0)
        loss.backward()
        optimizer.step()


def channels_last(model: nn.Module, optimizer: Any) -> None:
    """Weights and momenta in the layout in which GPUs convolve fastest."""
    model.to(memory_format=torch.channels_last)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 4:
                state[key] = value.contiguous(memory_format=torch.channels_last)


def changed(x: Tensor) -> Tensor:
    """Images flipped with probability 1/2, and moved by up to an eighth of their size in both directions."""
    most = x.shape[-1] // 8
    flipped = torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)
    padded, size = F.pad(flipped, (most,) * 4), x.shape[-1]
    rows, columns = (
        torch.randint(2 * most + 1, (len(x), 1), device=x.device) + torch.arange(size, device=x.device) for _ in "rc"
    )
    return padded[torch.arange(len(x), device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )


def cut_out(x: Tensor) -> Tensor:
    """Images with a square of a quarter of their size set to zero, its middle anywhere."""
    size = x.shape[-1]
    places = torch.arange(size, device=x.device)
    rows, columns = ((torch.randint(size, (len(x), 1), device=x.device) - places).abs() <= size // 8 for _ in "rc")
    return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


@torch.no_grad()
def error(model: nn.Module, images: Images) -> float:
    """The share of evaluation images that are classified wrongly."""
    model.eval()
    wrong = [(model(x).argmax(1) != y).sum() for x, y in zip(images.test_x.split(1000), images.test_y.split(1000), strict=True)]
    return float(sum(wrong)) / len(images.test_y)
