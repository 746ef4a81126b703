"""The effective rank of what units compute: how many of them are different from each other.

With the singular values s of the activations (samples × units) and p = s / Σ s, it is exp(−Σ p log p): the number of equal
singular values that have the same entropy (O. Roy, M. Vetterli, 2007). K. Maile et al. (2022) count the s above a threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor


def singular_values(products: Tensor) -> Tensor:
    """The singular values of activations, from the mean products of two units."""
    values: Tensor = torch.linalg.eigvalsh(products.double().cpu()).clamp(min=0.0).sqrt().flip(0)
    return values


def effective_rank(values: Tensor) -> float:
    """The exponential of the entropy of singular values.

    Example:
        >>> effective_rank(torch.tensor([2.0, 2.0, 0.0, 0.0]))
        2.0
    """
    total = float(values.sum())
    if total == 0.0:
        return 0.0
    shares = values[values > 0] / total
    return float((-(shares * shares.log()).sum()).exp())


def numerical_rank(values: Tensor, threshold: float = 0.01) -> int:
    """The number of singular values above a part of the largest one.

    Example:
        >>> numerical_rank(torch.tensor([5.0, 1.0, 0.001]))
        2
    """
    return int((values > threshold * values.max()).sum())
