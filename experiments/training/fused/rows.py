"""Networks as rows of numbers: which parameters a row has, in which order, and what belongs to them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outgrow
from experiments.setting.models import Block, ResNetCifar, SmallConv
from experiments.training.fused.network import Shape


def shape_of(model: nn.Module) -> Shape | int:
    """What networks must share to be trained together."""
    if isinstance(model, SmallConv):
        return model.conv1.out_channels
    assert isinstance(model, ResNetCifar), f"there are no kernels for {type(model).__name__}: train it by the eager engine"
    residual = isinstance(model.layer1[0], Block)
    per = 1 if residual else 2
    blocks = len(model.layer1) // per, len(model.layer2) // per
    return Shape(model.conv1.out_channels, model.fc.in_features, blocks, residual)


def layers_of(model: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions and their norms, in the order of `Layout.layers`."""
    if isinstance(model, SmallConv):
        return []
    pairs: list[Any] = [(model.conv1, model.bn1)]
    for stage in (model.layer1, model.layer2):
        for block in stage:
            if isinstance(block, Block):
                pairs += [(block.conv1, block.bn1), (block.conv2, block.bn2)]
                pairs += [tuple(block.skip)] if len(block.skip) else []
            else:
                pairs.append((block[0], block[1]))
    return pairs


def parameters_of(model: Any) -> list[nn.Parameter]:
    """In the order of a row. A bias that a norm takes away again is left out: see `means_of`."""
    if isinstance(model, SmallConv):
        return list(model.parameters())
    pairs = layers_of(model)
    linear = [model.fc.weight, model.fc.bias]
    return [
        *(conv.weight for conv, _ in pairs),
        *linear,
        *(norm.weight for _, norm in pairs),
        *(norm.bias for _, norm in pairs),
    ]


def row_of(tensors: Sequence[Tensor]) -> Tensor:
    """Convolutions as (out, row, column, in), everything else as it lies."""
    return torch.cat([(tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor).reshape(-1) for tensor in tensors])


def write_row(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `row_of`."""
    at = 0
    for tensor in tensors:
        part, at = row[at : at + tensor.numel()], at + tensor.numel()
        if tensor.ndim == 4:
            o, i, h, w = tensor.shape
            tensor.copy_(part.view(o, h, w, i).permute(0, 3, 1, 2))
        else:
            tensor.copy_(part.view_as(tensor))


def biases_of(model: nn.Module) -> Tensor:
    """What convolutions add before their norms; zero where they have no bias."""
    pairs = layers_of(model)
    parts = [torch.zeros(norm.num_features) if conv.bias is None else conv.bias.detach() for conv, norm in pairs]
    return torch.cat(parts) if parts else torch.zeros(0)


def paces_of(model: nn.Module, factor: float) -> list[Tensor]:
    """For each parameter, in the order of a row: the factor where an entry came with the last growth, else one."""
    born, names = outgrow.cohorts(model), {id(parameter): name for name, parameter in model.named_parameters()}
    last = born.count
    return [1 + (factor - 1) * (born[names[id(p)]] == last).float().expand(p.shape) * (last > 0) for p in parameters_of(model)]


def held_back(model: nn.Module) -> Tensor:
    """One for the channels of norms that end a block of the last growth, else zero."""
    born, names = outgrow.cohorts(model), {id(parameter): name for name, parameter in model.named_parameters()}
    ends = {id(block.bn2) for block in model.modules() if isinstance(block, Block)}
    rows = []
    for _, norm in layers_of(model):
        new = bool((born[names[id(norm.weight)]] == born.count).all()) and id(norm) in ends
        rows.append(torch.full(norm.weight.shape, float(new)))
    return torch.cat(rows)


def drifts_of(model: nn.Module) -> list[Tensor]:
    """For each parameter, in the order of a row: how far a step moves it that has no gradients, since it is fading in."""
    twin = copy.deepcopy(model)
    before = [parameter.detach().clone() for parameter in parameters_of(twin)]
    torch.optim.SGD(twin.parameters()).step()
    return [parameter.detach() - old for parameter, old in zip(parameters_of(twin), before, strict=True)]
