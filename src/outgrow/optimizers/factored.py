"""Factored second moments: V ≈ r cᵀ / mean(r), where r and c are means of V over one axis each (Adafactor).

Each factor grows along its own axis, and is multiplied by the ratio of the other factor's means after and before the growth.
The two averaged axes depend on the library, and may depend on the sizes: after a growth they can be swapped, or a second moment
that was kept whole can have become large enough to be factored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outgrow.apply.grow_tensor import grown_moment
from outgrow.growth_plan.plan import Edit, Insertion

Axes = tuple[int, int]  # averaged over by the row means, and by the column means


def axes_of(optimizer: Optimizer, name: str, parameter: Tensor | None, shape: Sequence[int]) -> Axes | None:
    """The axes that are averaged over for a parameter of this shape; None if its second moment is kept whole."""
    if name not in CHOICES:
        return _last_two(tuple(shape))
    group: Mapping[str, Any] = next(
        (group for group in optimizer.param_groups if any(parameter is held for held in group["params"])), optimizer.defaults
    )
    return CHOICES[name](group, tuple(shape))


def _last_two(shape: tuple[int, ...]) -> Axes | None:
    return (len(shape) - 1, len(shape) - 2) if len(shape) > 1 else None


def _channels_first(group: Mapping[str, Any], shape: tuple[int, ...]) -> Axes | None:
    """timm's Adafactor: the channels of a convolution, or the last two axes, if both are large."""
    least, ndim = group["min_dim_size_to_factor"], len(shape)
    if ndim > 2 and min(shape[:2]) > least:
        return 1, 0
    return (ndim - 1, ndim - 2) if ndim > 1 and min(shape[-2:]) > least else None


def _largest_two(group: Mapping[str, Any], shape: tuple[int, ...]) -> Axes | None:
    """timm's AdafactorBigVision: the largest axis and the next."""
    order = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))
    if len(shape) < 2 or shape[order[-2]] < group["min_dim_size_to_factor"]:
        return None
    return order[-1], order[-2]


CHOICES: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], Axes | None]] = {
    "timm.Adafactor": _channels_first,
    "timm.AdafactorBigVision": _largest_two,
}


def grown_factors(row: Tensor, column: Tensor, ndim: int, axes: Axes, edits: Sequence[Edit]) -> tuple[Tensor, Tensor]:
    """Both factors after a growth. Some optimizers keep the averaged axis with size one, others drop it."""
    kept = row.ndim == ndim
    rows, columns = (row, column) if kept else (row.unsqueeze(axes[0]), column.unsqueeze(axes[1]))
    new_rows = _grown_factor(rows, columns, axes[0], edits)
    new_columns = _grown_factor(columns, rows, axes[1], edits)
    return (new_rows, new_columns) if kept else (new_rows.squeeze(axes[0]), new_columns.squeeze(axes[1]))


def _grown_factor(factor: Tensor, other: Tensor, averaged: int, edits: Sequence[Edit]) -> Tensor:
    """One factor after a growth. averaged: the axis over which this factor is a mean, and along which the other one varies."""
    here = [edit for edit in edits if isinstance(edit, Insertion) and edit.axis == averaged]
    if here:
        before, after = (t.mean(dim=averaged, keepdim=True) for t in (other, _grown_square(other, here)))
        factor = factor * torch.where(before > 0, after / before, torch.ones_like(before))
    return _grown_square(factor, [edit for edit in edits if edit not in here])


def _grown_square(old: Tensor, edits: Sequence[Edit]) -> Tensor:
    return grown_moment(old, edits, 2, "mean")


def refactored(
    name: str, state: Mapping[Any, Any], factors: Sequence[tuple[str, str]], before: Axes | None, now: Axes | None
) -> tuple[dict[Any, Any], list[Any]]:
    """Grown state in the form that the optimizer expects for the new sizes, and the keys that it no longer expects."""
    result = dict(state)
    if before is not None and now == before[::-1]:
        for row, column in factors:
            if row in result:
                result[row], result[column] = result[column], result[row]
    if before is None and now is not None and name == "timm.Adafactor":
        whole = result.pop("exp_avg_sq")
        result["exp_avg_sq_row"], result["exp_avg_sq_col"] = whole.mean(dim=now[0]), whole.mean(dim=now[1])
        return result, ["exp_avg_sq"]
    return result, []
