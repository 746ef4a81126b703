"""The vocabulary of optimizer state: how each piece of it follows a growth of its parameter.

Let a new unit be a copy that takes the share α of its source. The gradient of the copy is then α times that of the source, at
all past steps too. A piece of state that scales like the p-th power of the gradient is therefore multiplied by αᵖ:

    word             scales like   entries that are not copies start at
    first moment     g             zero
    second moment    g²            the mean of the existing entries
    magnitude        |g|           the mean of the existing entries
    update           1             zero (a momentum of normalised updates)
    step length      1             the mean of the existing entries
    rate             1/|g|         the mean of the existing entries
    weights          –             what the parameter itself has there: the tensor grows as a network of its own

A second moment does not start at zero: the step count of its tensor is large already, so that Adam's first update would be
(1 − β₁)/√(1 − β₂) ≈ 3 learning rates long, however small the gradient.

The other words: "row means" and "column means" are the two factors of a factored second moment (averaged over the last axis,
and over the last but one); "per row" has one second moment for each index of the first axis; "matrices" is a preconditioner
over each axis; "scalar" is one value for the whole parameter, kept as it is; "step count" is a scalar too, and says that steps
are counted for each parameter apart; "fresh" is dropped, for the optimizer to make it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """How one piece of state follows.

    kind: "entries" (of the parameter's shape), "weights", "factor", "row", "matrices", "scalar" or "fresh".
    power: of the gradient, for entries and rows.
    start: of entries that are not copies, "zero" or "mean".
    axis: for a factor, the axis that it is averaged over, counted from the end.
    """

    word: str
    kind: str
    power: int = 0
    start: str = "zero"
    axis: int = 0


WORDS: dict[str, Rule] = {
    rule.word: rule
    for rule in (
        Rule("weights", "weights"),
        Rule("first moment", "entries", 1, "zero"),
        Rule("second moment", "entries", 2, "mean"),
        Rule("magnitude", "entries", 1, "mean"),
        Rule("update", "entries", 0, "zero"),
        Rule("step length", "entries", 0, "mean"),
        Rule("rate", "entries", -1, "mean"),
        Rule("row means", "factor", 2, "mean", -1),
        Rule("column means", "factor", 2, "mean", -2),
        Rule("per row", "row", 2, "mean"),
        Rule("matrices", "matrices"),
        Rule("scalar", "scalar"),
        Rule("step count", "scalar"),
        Rule("fresh", "fresh"),
    )
}


def shape_of(rule: Rule, value: Tensor, shape: Sequence[int]) -> Shape | None:
    """The shape that a tensor of this rule has for a parameter of that shape; None where the rule does not say.

    value: the tensor that is there, for optimizers that keep an averaged axis with size one and those that drop it.
    """
    if rule.kind in ("entries", "weights"):
        return tuple(shape)
    if rule.kind == "factor" and len(shape) > 1:
        axis = len(shape) + rule.axis
        middle = (1,) if value.ndim == len(shape) else ()
        return (*shape[:axis], *middle, *shape[axis + 1 :])
    if rule.kind == "row" and len(shape) > 0:
        return (shape[0], *(1,) * (len(shape) - 1)) if value.ndim == len(shape) else (shape[0],)
    return None
