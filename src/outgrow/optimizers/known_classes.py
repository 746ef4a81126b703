"""Tables of known optimizer classes: package and class → state key → word of `state_rules.py`. No library is imported for this.

A key may be a pattern. Classes that are known but can't follow a growth, or not every growth, are listed with the reason.
"""

from __future__ import annotations

from outgrow.optimizers.known_others import OTHERS, OTHERS_NO_COPIES, OTHERS_REFUSED
from outgrow.optimizers.known_pytorch_optimizer import PYTORCH_OPTIMIZER, PYTORCH_OPTIMIZER_NO_COPIES, PYTORCH_OPTIMIZER_REFUSED
from outgrow.optimizers.known_torch import TORCH, TORCH_REFUSED, Words

KNOWN: dict[str, Words] = {**TORCH, **OTHERS, **PYTORCH_OPTIMIZER}
REFUSED: dict[str, str] = {**TORCH_REFUSED, **OTHERS_REFUSED, **PYTORCH_OPTIMIZER_REFUSED}
NO_COPIES: dict[str, str] = {**OTHERS_NO_COPIES, **PYTORCH_OPTIMIZER_NO_COPIES}
WRAPPED: dict[str, str] = {"lookahead_slow_buff": "weights", "old_p": "weights"}  # that wrappers put into any state

# Classes with a setting (a rank, a subset, a size from which moments are factored) that gives part of their state other shapes.
# A growth checks the shapes that it finds; a shape that is not the parameter's says nothing about an optimizer otherwise.
SEVERAL_SHAPES = frozenset(
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
