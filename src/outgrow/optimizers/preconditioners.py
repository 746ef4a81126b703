"""Square matrices over one axis of a parameter: the preconditioners of Shampoo and SOAP.

Let the axis grow from n to n + m, and let no new entry be a copy. With P over the old positions, the grown matrix is

    [P  0 ]
    [0  dI]

so that it acts on the old part of a gradient as P did. d is the mean of P's diagonal for a covariance, one for an orthogonal
basis, and the least entry of the diagonal for an inverse root, which multiplies the gradient: the first update of a new entry
is then not longer than that of an old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outgrow.apply.grow_tensor import grown_moment
from outgrow.growth_plan.plan import Edit, Insertion


def grown_matrix(old: Tensor, axis: int, edits: Sequence[Edit], start: str) -> Tensor:
    """The grown matrix over this axis. old: the matrix, or a vector with its diagonal only."""
    here = [edit for edit in edits if isinstance(edit, Insertion) and edit.axis == axis]
    if not here:
        return old
    diagonal = old if old.ndim == 1 else old.diagonal()
    rows = [replace(edit, axis=0) for edit in here]
    edits_of_both = rows if old.ndim == 1 else [*rows, *(replace(edit, axis=1) for edit in here)]
    new = grown_moment(old, edits_of_both, 0, "zero")
    marks = grown_moment(torch.ones_like(diagonal), rows, 0, "zero")
    fresh = (marks == 0).nonzero().flatten()
    if old.ndim == 1:
        new[fresh] = level_of(old, start)
    else:
        new[fresh, fresh] = level_of(old, start)
    return new


def level_of(matrix: Tensor, start: str) -> Tensor:
    """d, for a matrix or for its diagonal."""
    diagonal = matrix if matrix.ndim == 1 else matrix.diagonal()
    if start == "one":
        return torch.ones((), dtype=matrix.dtype, device=matrix.device)
    return diagonal.mean() if start == "mean" else diagonal.min()
