"""Modules that a growth builds instead of copying one of the model's: a residual block, a single layer, a branch.

Each is described by plain data, so that a recorded growth can be repeated on a new model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.modules.gates import PActivation
from outgrow.wrong_arguments import usage

LINEAR = 0
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
LAYERS: dict[str, Any] = {kind.__name__: kind for kind in (nn.Linear, *CONVOLUTIONS.values(), *TRANSPOSED.values())}
NORMS = {LINEAR: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def make_layer(dims: int, before: int, after: int, kernel: int) -> nn.Module:
    """A linear layer (dims 0) or a convolution that keeps the size of its input."""
    if dims == LINEAR:
        return nn.Linear(before, after)
    return CONVOLUTIONS[dims](before, after, kernel, padding=kernel // 2 if kernel % 2 else "same")


@usage("outgrow.ResidualBlock(16)")
class ResidualBlock(nn.Module):
    """x + f(x), with f two or more layers.

    Args:
        channels: number of input and output channels.
        hidden: number of channels between the layers; equal to `channels` by default.
        layers: number of layers.
        dims: dimensions of the convolutions; 0 for linear layers over the last axis.
        kernel: kernel size of the convolutions.
        norm: whether batch norms are between the layers (there is none at the end).
        activation: name of a class of torch.nn.

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


class Parallel(nn.Module):
    """The sum of its children's outputs on one input: a module of the model, and the branches in parallel to it.

    Further arguments are passed to the module, and to branches that are copies of it.

    Example:
        >>> Parallel(nn.Identity(), nn.Identity())(torch.ones(2)).tolist()
        [2.0, 2.0]
    """

    def __init__(self, *children: nn.Module) -> None:
        super().__init__()
        for index, child in enumerate(children):
            self.add_module(str(index), child)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        main, *branches = self.children()
        x = args[0] if args else next(iter(kwargs.values()))
        result: Tensor = main(*args, **kwargs)
        for branch in branches:
            result = result + (branch(*args, **kwargs) if type(branch) is type(main) else branch(x))
        return result


def branch(first: Mapping[str, Any], channels: int, layers: int, dims: int, norm: bool, activation: str) -> nn.Sequential:
    """A first layer with all options given, and further layers that keep the spatial size of its output."""
    options = dict(first)
    layer = LAYERS[options.pop("type")](**options)
    hidden = layer.out_features if dims == LINEAR else layer.out_channels
    parts: list[nn.Module] = [layer]
    for index in range(1, layers):
        parts += [NORMS[dims](hidden)] if norm else []
        parts += [getattr(nn, activation)(), make_layer(dims, hidden, channels if index == layers - 1 else hidden, 1)]
    return nn.Sequential(*parts)


def build(made: Mapping[str, Any], like: Tensor) -> nn.Module:
    """Build a module from its description, on the device and in the type of a tensor."""
    options = {key: value for key, value in made.items() if key not in ("kind", "seed")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(made.get("seed", 0))
        block: nn.Module = KINDS[made["kind"]](**options)
    return block.to(like.device, like.dtype)


def single_layer(
    channels: int, dims: int, kernel: int, norm: bool, activation: str, soft: int = 0, leading: bool = False
) -> nn.Module:
    """A layer, a batch norm if `norm`, and an activation if one is named: after the layer, or before it if `leading`.

    soft: number of optimizer steps over which the activation fades in; none if 0.
    """
    parts: list[nn.Module] = [make_layer(dims, channels, channels, kernel)]
    parts += [NORMS[dims](channels)] if norm else []
    function: nn.Module | None = getattr(nn, activation)() if activation else None
    if function is not None:
        parts.insert(0 if leading else len(parts), PActivation(function, soft) if soft else function)
    return nn.Sequential(*parts)


KINDS: dict[str, Callable[..., nn.Module]] = {"residual": ResidualBlock, "layer": single_layer, "branch": branch}


@torch.no_grad()
def make_identity(block: nn.Sequential, outputs: Tensor) -> None:
    """Net2DeeperNet: make the layer the identity, and the batch norm the identity on a batch of outputs."""
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
    """NetMorph: make the layer undo the rotation of the layer before it."""
    layer: Any = next(part for part in block if hasattr(part, "weight"))
    layer.weight.copy_(matrix.to(layer.weight).view_as(layer.weight))
    nn.init.zeros_(layer.bias)
