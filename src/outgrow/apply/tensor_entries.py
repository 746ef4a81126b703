"""Read and write the entries of a tensor at positions along an axis: by slices if there are few, otherwise by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from outgrow.apply.final_positions import FEW_SLICES, FinalPlace, Positions, gapless_runs, is_range


def scatter(new: Tensor, old: Tensor, where: Mapping[int, Positions]) -> None:
    """new[where…] = old, for positions in many separate runs."""
    if not where:
        new.copy_(old)
        return
    runs = {axis: gapless_runs(positions) for axis, positions in where.items()}
    axis = min(runs, key=lambda axis: len(runs[axis]))
    rest = {other: positions for other, positions in where.items() if other != axis}
    if len(runs[axis]) <= FEW_SLICES:
        for start, first, count in runs[axis]:
            scatter(new.narrow(axis, first, count), old.narrow(axis, start, count), rest)
    elif not rest:
        new.index_copy_(axis, index(where[axis], new), old)
    else:
        shape = [*new.shape[:axis], len(where[axis]), *new.shape[axis + 1 :]]
        inner = torch.empty(shape, dtype=old.dtype, device=old.device)
        scatter(inner, old, rest)
        new.index_copy_(axis, index(where[axis], new), inner)


def index(positions: Positions, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions)).to(like.device)


def part(tensor: Tensor, axis: int, positions: Positions) -> Tensor:
    """The part at ascending positions: a view if they are a range, a copy otherwise."""
    if is_range(positions):
        return tensor.narrow(axis, int(positions[0]), len(positions))
    return tensor.index_select(axis, index(positions, tensor))


def put(tensor: Tensor, axis: int, positions: Positions, block: Tensor) -> None:
    """tensor[positions] = block."""
    runs = gapless_runs(positions)
    if len(runs) > FEW_SLICES:
        tensor.index_copy_(axis, index(positions, tensor), block.to(tensor.dtype).contiguous())
        return
    for start, first, count in runs:
        tensor.narrow(axis, first, count).copy_(block.narrow(axis, start, count))


def set_all(tensor: Tensor, axis: int, place: FinalPlace, value: float | Tensor) -> None:
    """Give all new entries of a place one value."""
    if place.span is not None:
        tensor.narrow(axis, *place.span).fill_(value)
    else:
        tensor.index_fill_(axis, index(place.at, tensor), value)


def multiply(tensor: Tensor, axis: int, positions: Positions, factors: Sequence[float]) -> None:
    """tensor[positions] *= factors."""
    if factors.count(1.0) == len(factors):
        return
    row = torch.tensor(factors, dtype=tensor.dtype, device=tensor.device).view(along(axis, tensor.ndim))
    scaled = part(tensor, axis, positions).mul_(row)
    if not is_range(positions):
        put(tensor, axis, positions, scaled)


def along(axis: int, ndim: int) -> list[int]:
    return [-1 if a == axis else 1 for a in range(ndim)]


def reals(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as pairs of real values, so that both parts are drawn; other tensors as they are."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
