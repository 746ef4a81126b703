"""Modules that a deepening builds where a model has no blocks of its own: a residual block, and a single layer.

Each is described by plain data, so that a history can build it again on a fresh model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.training.fade import PActivation

LINEAR = 0
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {LINEAR: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def make_layer(dims: int, before: int, after: int, kernel: int) -> nn.Module:
    """A linear layer (dims 0) or a convolution that keeps the size of its input."""
    if dims == LINEAR:
        return nn.Linear(before, after)
    return CONVOLUTIONS[dims](before, after, kernel, padding=kernel // 2 if kernel % 2 else "same")


class ResidualBlock(nn.Module):
    """x + f(x), with f two or more layers.

    Args:
        channels: of its input and output.
        hidden: of the layers inside; as many as channels by default.
        layers: how many.
        dims: of the convolutions; 0 for linear layers over the last axis.
        kernel: of the convolutions.
        norm: batch norms between the layers (there is none at the end).
        activation: the name of a class of torch.nn.

    Example:
        >>> block = ResidualBlock(4, dims=2)
        >>> block(torch.zeros(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def __init__(
        self,
        channels: int,
        hidden: int | None = None,
        layers: int = 2,
        dims: int = LINEAR,
        kernel: int = 3,
        norm: bool = False,
        activation: str = "ReLU",
    ) -> None:
        super().__init__()
        sizes = [channels, *[hidden or channels] * (layers - 1), channels]
        branch: list[nn.Module] = []
        for index in range(layers):
            branch.append(make_layer(dims, sizes[index], sizes[index + 1], kernel))
            if index < layers - 1:
                branch += [NORMS[dims](sizes[index + 1])] if norm else []
                branch.append(getattr(nn, activation)())
        self.branch = nn.Sequential(*branch)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.branch(x)
        return result


def build(made: Mapping[str, Any], like: Tensor) -> nn.Module:
    """A module from its description, on the device and in the type of a tensor."""
    options = {key: value for key, value in made.items() if key not in ("kind", "seed")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(made.get("seed", 0))
        block: nn.Module = ResidualBlock(**options) if made["kind"] == "residual" else single_layer(**options)
    return block.to(like.device, like.dtype)


def single_layer(
    channels: int, dims: int, kernel: int, norm: bool, activation: str, soft: int = 0, leading: bool = False
) -> nn.Module:
    """A layer, a batch norm if asked, and an activation if one is named: behind the layer, or before it if `leading`.

    soft: over how many steps the activation sets in; at once if 0.
    """
    parts: list[nn.Module] = [make_layer(dims, channels, channels, kernel)]
    parts += [NORMS[dims](channels)] if norm else []
    bent: nn.Module | None = getattr(nn, activation)() if activation else None
    if bent is not None:
        parts.insert(0 if leading else len(parts), PActivation(bent, soft) if soft else bent)
    return nn.Sequential(*parts)


@torch.no_grad()
def make_identity(block: nn.Sequential, outputs: Tensor) -> None:
    """Net2DeeperNet: a layer that is the identity, and a batch norm that gives back what it takes on a batch of outputs."""
    layer: Any = next(part for part in block if hasattr(part, "weight"))
    nn.init.eye_(layer.weight) if isinstance(layer, nn.Linear) else nn.init.dirac_(layer.weight)
    nn.init.zeros_(layer.bias)
    for norm in (part for part in block if isinstance(part, nn.modules.batchnorm._BatchNorm)):
        axes = [axis for axis in range(outputs.ndim) if axis != 1]
        variance, mean = torch.var_mean(outputs, axes, correction=0)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean)


@torch.no_grad()
def make_rotation(block: nn.Sequential, matrix: Tensor) -> None:
    """NetMorph: a layer that undoes the rotation of the one before it."""
    layer: Any = next(part for part in block if hasattr(part, "weight"))
    layer.weight.copy_(matrix.to(layer.weight).view_as(layer.weight))
    nn.init.zeros_(layer.bias)
