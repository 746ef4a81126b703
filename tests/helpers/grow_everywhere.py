"""Grow a model at every volume, by every method that is said to be exact there, and let an independent judge compare."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

import outgrow
from tests.helpers.judging import assert_same_function

DTYPE = torch.float64


@torch.no_grad()
def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in double precision, complex parameters too, every parameter random, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.layout is torch.strided:
                setattr(module, name, buffer.to(DTYPE))
    for parameter in model.parameters():
        kind = torch.complex128 if parameter.is_complex() else DTYPE
        parameter.data = parameter.detach().to(kind)
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=kind))
    return model.eval()


def growable(model: nn.Module, x: Any) -> dict[str, tuple[str, ...]]:
    """The volumes that can grow, and by which methods."""
    return {volume.name: volume.methods for volume in outgrow.volumes(model, x) if volume.growable}


def reasons(model: nn.Module, x: Any) -> dict[str, str]:
    """The volumes that can't grow, and why."""
    return {volume.name: volume.reason for volume in outgrow.volumes(model, x) if not volume.growable}


def assert_exact_everywhere(
    model: nn.Module, x: Any, fresh: Any, names: Collection[str], modes: tuple[bool, ...] = (False, True), check: bool = True
) -> None:
    """`names` are the volumes that must be growable; `fresh` are inputs that the growth never saw."""
    found = {volume.name: volume for volume in outgrow.volumes(model, x) if volume.growable}
    assert set(found) == set(names), {v.name: v.methods or v.reason for v in outgrow.volumes(model, x)}
    for name, volume in found.items():
        for method in volume.methods:
            grown = copy.deepcopy(model)
            before = sum(parameter.numel() for parameter in grown.parameters())
            outgrow.widen(grown, x, name, by=2 * volume.size, method=method, check=check)
            assert sum(parameter.numel() for parameter in grown.parameters()) > before
            assert_same_function(model, grown, [x, fresh], modes)
