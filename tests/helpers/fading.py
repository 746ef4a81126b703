"""Optimizer steps while something fades in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.helpers.residual_chain import X


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, x: Tensor = X) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
