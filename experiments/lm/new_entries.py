"""New entries with a state and a rate of their own, as in SPARKLING: their moments begin at zero, and their rate rises again.

Existing entries keep their state and their rate. All new entries lie behind the existing ones, along every axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class NewEntries:
    """The entries of a grown model's parameters that lie outside of the previous shapes."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
        masks = {parameter: _outside(parameter, shapes[name]) for name, parameter in model.named_parameters() if name in shapes}
        self.masks = {parameter: mask for parameter, mask in masks.items() if bool(mask.any())}

    @torch.no_grad()
    def reset(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Zero their moments."""
        for optimizer in optimizers:
            for parameter, mask in self.masks.items():
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, Tensor) and value.shape == mask.shape:
                        value.masked_fill_(mask, 0.0)

    @contextmanager
    def slowed(self, factor: float) -> Iterator[None]:
        """Let an optimizer's step inside the context move them by a part of the way only."""
        before = {parameter: parameter.detach().clone() for parameter in self.masks}
        yield
        with torch.no_grad():
            for parameter, mask in self.masks.items():
                parameter.copy_(torch.where(mask, torch.lerp(before[parameter], parameter, factor), parameter))


def _outside(parameter: Tensor, shape: torch.Size) -> Tensor:
    mask = torch.ones(parameter.shape, dtype=torch.bool, device=parameter.device)
    mask[tuple(slice(size) for size in shape)] = False
    return mask
