"""Unwrap the user's own module; arguments as lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def bare(model: Any) -> Any:
    """The user's own module inside `torch.compile` and DistributedDataParallel."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in getattr(model, "_modules", ()):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._modules["_orig_mod"]
    return model


def as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def unwrapped_module(model: nn.Module) -> nn.Module:
    """The user's own module, also inside DataParallel and AveragedModel."""
    inner: nn.Module = bare(model)
    return (
        unwrapped_module(inner.module) if isinstance(inner, (nn.DataParallel, torch.optim.swa_utils.AveragedModel)) else inner
    )
