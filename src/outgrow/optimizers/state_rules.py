"""The words that describe optimizer state: how each kind of state grows with its parameter.

Let a new unit be a copy that takes the share α of its source. The gradient of the copy is then α times that of the source, at
all past steps too. State that scales like the p-th power of the gradient is therefore multiplied by αᵖ:

    word             scales like   entries that are not copies start at
    first moment     g             zero
    second moment    g²            the mean of the existing entries
    magnitude        |g|           the mean of the existing entries
    update           1             zero (a momentum of normalised updates)
    step length      1             the mean of the existing entries
    rate             1/|g|         the mean of the existing entries
    weights          –             the parameter's own values: the tensor grows like the parameter itself

A second moment does not start at zero: the step count of its tensor is large already, so that Adam's first update would be
(1 − β₁)/√(1 − β₂) ≈ 3 learning rates long, however small the gradient.

Tensors of other shapes: "row means" and "column means" are the two factors of a factored second moment (averaged over the last
axis, and over the last but one). "per row" has one second moment for each index of the first axis. "covariance", "basis" and
"inverse root" are square matrices over an axis, as a list with one for each axis or under keys that end in the number of the
axis; new rows and columns are those of the identity, times the mean of the diagonal (covariance), one (basis) or the least
entry of the diagonal (inverse root).

"scalar" is one value for the whole parameter, or an object other than a tensor; it is kept. "step count" is a scalar too, and
means that steps are counted per parameter. "fresh" is dropped, and the optimizer makes it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StateRule:
    """How the state under one key grows.

    kind: "entries" (of the parameter's shape, or flattened), "weights", "factor", "row", "matrices", "scalar" or "fresh".
    power: of the gradient, by which the state scales.
    start: value of new entries that are not copies: "zero", "mean"; on the diagonal of matrices: "mean", "one", "least".
    side: 0 for the row means of a factored moment, 1 for the column means.
    """

    word: str
    kind: str
    power: int = 0
    start: str = "zero"
    side: int = 0


WORDS: dict[str, StateRule] = {
    rule.word: rule
    for rule in (
        StateRule("weights", "weights"),
        StateRule("first moment", "entries", 1, "zero"),
        StateRule("second moment", "entries", 2, "mean"),
        StateRule("magnitude", "entries", 1, "mean"),
        StateRule("update", "entries", 0, "zero"),
        StateRule("step length", "entries", 0, "mean"),
        StateRule("rate", "entries", -1, "mean"),
        StateRule("row means", "factor", 2, "mean", 0),
        StateRule("column means", "factor", 2, "mean", 1),
        StateRule("per row", "row", 2, "mean"),
        StateRule("covariance", "matrices", 2, "mean"),
        StateRule("basis", "matrices", 0, "one"),
        StateRule("inverse root", "matrices", 0, "least"),
        StateRule("scalar", "scalar"),
        StateRule("step count", "scalar"),
        StateRule("fresh", "fresh"),
    )
}
PLAIN = frozenset({"row", "matrices"})  # kinds that can't follow copies with shares


def shape_of(rule: StateRule, value: Tensor, shape: Sequence[int], axes: tuple[int, int] | None) -> Shape | None:
    """The shape that a tensor with this rule has for a parameter of that shape; None where the rule does not determine it.

    value: the present tensor, which shows whether the optimizer flattens, and whether it keeps an averaged axis with size one.
    axes: those over which row means and column means are averaged.
    """
    if rule.kind in ("entries", "weights"):
        return (math.prod(shape),) if value.ndim == 1 != len(shape) else tuple(shape)
    if rule.kind == "factor" and axes is not None:
        axis = axes[rule.side]
        middle = (1,) if value.ndim == len(shape) else ()
        return (*shape[:axis], *middle, *shape[axis + 1 :])
    if rule.kind == "row" and len(shape) > 0:
        return (shape[0], *(1,) * (value.ndim - 1))
    return None
