"""Random values for all parameters and buffers: fresh models hide mistakes behind zeros and ones."""

from __future__ import annotations

import torch
from torch import nn

DTYPE = torch.float64


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of a sensible size, so that signals neither die nor explode; variances positive."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        drawn = torch.randn(tensor.shape, generator=generator, dtype=DTYPE)
        if tensor.ndim > 1:
            drawn *= max(tensor[0].numel(), 1) ** -0.5
        elif "running_var" in name:
            drawn = drawn.abs() + 0.5
        elif name.endswith(("weight", "gamma")):
            drawn = 1 + 0.3 * drawn
        else:
            drawn *= 0.3
        tensor.copy_(drawn)
