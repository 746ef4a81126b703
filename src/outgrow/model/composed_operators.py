"""Operators of PyTorch that are recorded as elementary ones while a model is traced.

    bilinear    y[o] = Σ over i, j of x[i]·W[o, i, j]·z[j]    a layer that reads the outer product of x and z
    distances   d[n, m] = ‖x[n] − c[m]‖                       a difference and a norm

The elementary operators have rules, so that units are followed through them. The model itself runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """The product of three tensors, each with new axes of size one, summed over axes. `nn.Bilinear` calls it."""
    if [list(axes) for axes in (expand1, expand2, expand3, sumdim)] == [[1, 3], [0], [1, 2], [2, 3]]:
        outer = first.unsqueeze(2) * third.unsqueeze(1)  # (batch, in1, in2); the weight is (out, in1, in2)
        return outer.flatten(1) @ second.flatten(1).t()
    product = torch.ones((), dtype=first.dtype, device=first.device)
    for tensor, axes in ((first, expand1), (second, expand2), (third, expand3)):
        for axis in sorted(axes):
            tensor = tensor.unsqueeze(axis)
        product = product * tensor
    return product.sum(list(sumdim))


def distances(x: Tensor, other: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """(…, n, features), (…, m, features) → (…, n, m)."""
    difference = x.unsqueeze(-2) - other.unsqueeze(-3)
    if p == 1:
        return difference.abs().sum(-1)
    return difference.abs().amax(-1) if math.isinf(p) else torch.linalg.vector_norm(difference, p, dim=-1)


def distances_within(x: Tensor, p: float = 2.0) -> Tensor:
    """(n, features) → the distances of all pairs, each once."""
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device).unbind()
    return distances(x, x, p)[first, second]


COMPOSED: dict[Any, Any] = {
    aten._trilinear.default: trilinear,
    aten._cdist_forward.default: distances,
    aten._euclidean_dist.default: distances,
    aten._pdist_forward.default: distances_within,
}
