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


@torch.no_grad()
def randomise_parameters(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values for every parameter, by its name and shape: two models with the same parameters get the same values."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + len(name) * 1009 + sum(map(ord, name)))
        drawn = torch.randn(parameter.shape, generator=generator, dtype=DTYPE)
        if parameter.ndim > 1:
            drawn *= max(parameter[0].numel(), 1) ** -0.5
        else:
            drawn = 0.3 * drawn + ("bias" not in name)
        parameter.copy_(drawn)
    return model
