"""The folded residual (the paper's §4.2 and its appendix): a skip from a volume that was widened alone to one that was not.

If x^ℓ alone is widened to x̄, a skip that was the identity becomes r̄ with r̄(x̄) = r(x), which depends on what the new units are:

    R2R                    x̄ = [x; x_L; x_R], x_L = x_R      r̄(x̄) = r(x) + r(x_L) − r(x_R)
    NetMorph, zero writers  x̄ = [x; x_0], x_0 = 0             r̄(x̄) = r(x) + r(x_0)
    NetMorph, zero readers  x̄ = [x; u], u arbitrary           r̄(x̄) = r(x): r̄ has no weights that could grow from zero
    Net2Net                 x̄ = [x; copies of x]              r̄(x̄)_i = Σ a_j x̄_j over unit i and its copies, Σ a_j = 1

It is applied again when the volume is widened again. If the volume at the end of the skip is the wider one, r̄ pads with zeros,
or copies its result where the new units are copies. New units need not be as many as those of x: fewer are padded with zeros,
more wrap around.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outgrow.wrong_arguments import usage


@usage("outgrow.Fold(16)")
class Fold(nn.Module):
    """r: moves the entries of x in x̄ to their old channels, and adds those of new units. It has no parameters.

    Args:
        size: channels of input and output before either is widened: r is the identity then.
        dim: the axis of the channels.

    Attributes:
        keep: ranges that are added as they are, each (first channel of x̄, first channel of the result, count).
        pairs: ranges of x_L and x_R, each (first of x_L, first of x_R, first channel of the result, count).
        shared: ranges of units that are copied and of their copies, each (first channel of x̄, first channel of the result,
            factor, count).
        outputs: channels of the result.

    Example:
        >>> import torch
        >>> fold = Fold(2)
        >>> fold.pairs = ((2, 3, 0, 1),)
        >>> fold(torch.tensor([[1.0, 2.0, 7.0, 4.0]]))
        tensor([[4., 2.]])
    """

    def __init__(self, size: int, dim: int = 1) -> None:
        super().__init__()
        self.dim, self.outputs = dim, size
        self.keep: tuple[tuple[int, int, int], ...] = ((0, 0, size),)
        self.pairs: tuple[tuple[int, int, int, int], ...] = ()
        self.shared: tuple[tuple[int, int, float, int], ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"shared": (), **state})  # type: ignore[no-untyped-call]  # earlier pickles have no shared ranges

    def forward(self, x: Tensor) -> Tensor:
        parts = [self._place(x.narrow(self.dim, start, count), at) for start, at, count in self.keep]
        for left, right, at, count in self.pairs:
            difference = x.narrow(self.dim, left, count) - x.narrow(self.dim, right, count)
            parts.append(self._place(difference, at))
        for start, at, factor, count in self.shared:
            parts.append(self._place(x.narrow(self.dim, start, count) * factor, at))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _place(self, part: Tensor, at: int) -> Tensor:
        """The part padded with zeros on both sides, so that it begins at channel `at` of the result."""
        after = self.outputs - at - part.shape[self.dim]
        if not at and not after:
            return part
        return nn.functional.pad(part, [0, 0] * (part.ndim - 1 - self.dim) + [at, after])

    def extra_repr(self) -> str:
        shared = f", shared={self.shared}" if self.shared else ""
        return f"outputs={self.outputs}, keep={self.keep}, pairs={self.pairs}{shared}, dim={self.dim}"
