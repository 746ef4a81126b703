"""Optimizers follow a growth: the names that the rest of training uses. See `outgrow.optimizers`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outgrow.optimizers.grow import check_optimizers as check_optimizers
from outgrow.optimizers.grow import grow_optimizers as grow_optimizers
from outgrow.optimizers.known_torch import TORCH
from outgrow.optimizers.lookup import state_shape as state_shape
from outgrow.optimizers.lookup import unfollowable as unfollowable
from outgrow.optimizers.newcomers import adopt as adopt
from outgrow.optimizers.newcomers import thaw as thaw
from outgrow.optimizers.rules import WORDS, shape_of
from outgrow.optimizers.wrappers import held_by as held_by
from outgrow.optimizers.wrappers import unwrapped as unwrapped

ANEW = "make a new optimizer after the growth"


def expected_shape(key: str, value: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that a tensor under this key has with the optimizers of torch; None for an unknown key."""
    words = {word for rules in TORCH.values() for name, word in rules.items() if name == key}
    axes = (len(shape) - 1, len(shape) - 2) if len(shape) > 1 else None
    return shape_of(WORDS[words.pop()], value, shape, axes) if words else None
