"""Which weights of a grown model are new, and whether they learn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def new_entries(plan: Any, name: str, shape: torch.Size) -> Tensor:
    """Mask of the entries of a parameter that a plan added."""
    mask = torch.zeros(shape, dtype=torch.bool)
    born: dict[int, list[bool]] = {}
    for edit in plan.edits:
        if edit.tensor == name and hasattr(edit, "at"):
            now = born.setdefault(edit.axis, [False] * edit.size)
            fresh = set(edit.at)
            old = iter(now)
            born[edit.axis] = [True if index in fresh else next(old) for index in range(edit.size + len(edit.at))]
    for axis, flags in born.items():
        mask |= torch.tensor(flags).view([-1 if a == axis else 1 for a in range(mask.ndim)])
    return mask


def new_weights(model: nn.Module, plan: Any) -> dict[str, Tensor]:
    """Masks of all parameters that have new entries; a parameter of a new block is new as a whole."""
    blocks = tuple(f"{path}." for path in plan.new_blocks)
    masks: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = name.startswith(blocks) if blocks else False
        mask = torch.ones(parameter.shape, dtype=torch.bool) if whole else new_entries(plan, name, parameter.shape)
        if mask.any():
            masks[name] = mask.to(parameter.device)
    return masks


class Learning:
    """Watches new weights from the growth on: `look` after each backward pass, `shares` at the end.

    A weight learns if a gradient that is not zero reached it and it is no longer what it was: weight decay moves weights
    that no gradient reaches.
    """

    def __init__(self, model: nn.Module, plan: Any) -> None:
        self.masks = new_weights(model, plan)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if name in self.masks}
        self.start = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.reached = {name: torch.zeros_like(mask) for name, mask in self.masks.items()}

    def look(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.reached[name] |= parameter.grad != 0

    def shares(self) -> dict[str, float]:
        """How many there are; the shares of them that a gradient reached, that moved, and both; the worst tensor's share."""
        moved = {name: parameter.detach() != self.start[name] for name, parameter in self.parameters.items()}
        learned = {name: moved[name] & self.reached[name] for name in self.masks}
        count = {name: int(mask.sum()) for name, mask in self.masks.items()}
        total = sum(count.values())

        def share(flags: dict[str, Tensor]) -> float:
            return sum(int((flags[name] & mask).sum()) for name, mask in self.masks.items()) / max(total, 1)

        each = {name: int((learned[name] & mask).sum()) / count[name] for name, mask in self.masks.items()}
        worst = min(each, key=lambda name: each[name], default="")
        return {
            "new_weights": total,
            "gradient": share(self.reached),
            "moved": share(moved),
            "learned": share(learned),
            "worst_tensor": [worst, each.get(worst, 1.0)],
        }
