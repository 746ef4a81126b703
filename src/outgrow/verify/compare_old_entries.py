"""Compare outputs that have gained entries: only the old entries are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NewOutputEntries:
    """New entries of an output: its number of axes, the axis that gains them, its old size, and the new positions."""

    rank: int
    axis: int
    size: int
    at: tuple[int, ...]

    def between(self, old: Tensor, new: Tensor) -> bool:
        """Whether an output has gained these entries."""
        sizes = self.size, self.size + len(self.at)
        return old.ndim == new.ndim == self.rank and (old.shape[self.axis], new.shape[self.axis]) == sizes

    def without(self, new: Tensor) -> Tensor:
        """An output without its new entries."""
        kept = torch.ones(new.shape[self.axis], dtype=torch.bool)
        kept[list(self.at)] = False
        return new.index_select(self.axis, kept.nonzero().flatten().to(new.device))


def old_entries(old: Sequence[Tensor], new: Sequence[Tensor], gains: Sequence[NewOutputEntries]) -> tuple[Tensor, ...]:
    """New outputs, of which those that have gained entries have only the old ones."""
    found = []
    for one, other in zip(old, new, strict=False):
        for gain in gains:
            if one.shape != other.shape and gain.between(one, other):
                other = gain.without(other)
        found.append(other)
    return (*found, *new[len(found) :])
