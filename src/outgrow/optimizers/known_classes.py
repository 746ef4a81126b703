"""Tables of known optimizer classes: package and class → state key → word of `state_rules.py`. They import no library.

A key may be a pattern. Classes that are known but can't follow a growth, or not every growth, are listed with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outgrow.optimizers.known_others import OTHERS, OTHERS_NO_COPIES, OTHERS_REFUSED
from outgrow.optimizers.known_pytorch_optimizer import (
    PROJECTED,
    PYTORCH_OPTIMIZER,
    PYTORCH_OPTIMIZER_NO_COPIES,
    PYTORCH_OPTIMIZER_REFUSED,
)
from outgrow.optimizers.known_torch import TORCH, TORCH_REFUSED, Words

KNOWN: dict[str, Words] = {**TORCH, **OTHERS, **PYTORCH_OPTIMIZER}
REFUSED: dict[str, str] = {**TORCH_REFUSED, **OTHERS_REFUSED, **PYTORCH_OPTIMIZER_REFUSED}
NO_COPIES: dict[str, str] = {**OTHERS_NO_COPIES, **PYTORCH_OPTIMIZER_NO_COPIES}
WRAPPER_KEYS: dict[str, str] = {
    "lookahead_slow_buff": "weights",
    "old_p": "weights",
    "momentum_buffer": "first moment",  # Lookahead with pullback_momentum
}  # that wrappers add to any state


@dataclass(frozen=True)
class Setting:
    """A setting of a group with which a class can't follow a growth.

    key: of the group. harmless: values with which it can. axes: of the parameters concerned; None for all.
    """

    key: str
    harmless: tuple[Any, ...]
    reason: str
    axes: int | None = None


RANK = Setting("rank", (None,), PROJECTED, 2)
REFUSED_SETTINGS: dict[str, Setting] = {
    "prodigyopt.Prodigy": Setting(
        "slice_p", (None, 1), "it keeps every n-th entry of the flattened parameter, and entries move"
    ),
    "pytorch_optimizer.APOLLO": RANK,
    "pytorch_optimizer.Fira": RANK,
    "pytorch_optimizer.GaLore": RANK,
    "pytorch_optimizer.AdamWSN": Setting("sn", (None, False), "it keeps one second moment for each subset of entries"),
}

# Classes with a setting (a rank, a subset, a size from which moments are factored) that gives part of their state other shapes.
# A growth checks the shapes it finds; at other times such a shape does not show that the state is stale.
SHAPES_BY_SETTING = frozenset(
    {
        "prodigyopt.Prodigy",
        "pytorch_optimizer.APOLLO",
        "pytorch_optimizer.AdamWSN",
        "pytorch_optimizer.Fira",
        "pytorch_optimizer.GaLore",
        "timm.Adafactor",
        "timm.AdafactorBigVision",
    }
)
