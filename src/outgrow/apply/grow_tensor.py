"""Make the grown tensor: move old values to their new positions and fill in the new ones, with one allocation.

The same edits act on gradients and optimizer moments, which transform like gradients: a copy that gets a share of its unit's
contribution gets that share of its gradient, and other new entries start at zero or, for second moments, at the mean of the
existing ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from outgrow.apply.collected_writes import Writes, slices
from outgrow.apply.fills import Filling, Generators, Init, fill
from outgrow.apply.final_positions import TensorEdits, edits_of
from outgrow.apply.tensor_entries import index, multiply, put, reals, scatter, set_all
from outgrow.growth_plan.plan import Edit, Insertion, Rescaling, Rotation

MILLION = 2**20
PIECE = 2**17  # values
SMALL = 2**14  # values: writing all of them takes no longer than calling a function


def grown(old: Tensor, edits: Sequence[Edit], writes: Writes | None = None, new: Tensor | None = None) -> Tensor:
    """A tensor of the final shape with the old values in place; new entries are not filled yet.

    writes: if given, the old values are in place after `writes.make()`. new: memory for the result.
    """
    edits = edits_of(edits)
    new = _empty(old, edits) if new is None else new
    if writes is None or type(new) is not Tensor or (moved := slices(new, old, edits)) is None:
        _move(new, old, edits)
    else:
        writes.move(moved)
    return new


def _empty(old: Tensor, edits: TensorEdits) -> Tensor:
    shape = edits.shape_from(tuple(old.shape))
    if old.is_contiguous() and not _pinned(old):
        return old.new_empty(shape)
    return torch.empty(shape, dtype=old.dtype, device=old.device, memory_format=_memory_format(old), pin_memory=_pinned(old))


def _move(new: Tensor, old: Tensor, edits: TensorEdits) -> None:
    """Copy the old values to their new positions."""
    moved = slices(new, old, edits)
    if moved is None:
        return scatter(new, old, edits.where)
    for target, source in moved:
        target.copy_(source)


def _memory_format(old: Tensor) -> torch.memory_format:
    usual = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.ndim)
    last = usual is not None and not old.is_contiguous() and old.is_contiguous(memory_format=usual)
    return usual if usual is not None and last else torch.contiguous_format


def _pinned(old: Tensor) -> bool:
    """Whether a tensor lies in pinned memory, from which a GPU copies asynchronously."""
    return old.is_cpu and torch.cuda.is_initialized() and old.is_pinned()


def fill_values(
    new: Tensor,
    old: Tensor,
    edits: Sequence[Edit],
    others: Mapping[str, Tensor],
    seed: int,
    inits: Mapping[str, Init],
    deviation: float | None = None,
    draws_on: torch.device | None = None,
    generators: Generators | None = None,
    precision: torch.dtype | None = None,
) -> None:
    """Write the values of all edits into a tensor made by `grown`, in order.

    others: old tensors by name. deviation: the standard deviation of the old values, if it is known and needed.
    draws_on: the device whose generator draws, if not the tensor's own: CPU and GPU draw different values from the same seed.
    generators: of earlier calls, to be used again. precision: in which free values are drawn, if not the tensor's own.
    """
    if new.is_meta:  # a dry run on the meta device: there are only shapes
        return
    edits = edits_of(edits)
    if deviation is None:
        deviation = deviations([old])[0] if needs_deviation(edits) else 0.0
    device, generators = draws_on or new.device, generators or Generators()
    for edit, place in zip(edits, edits.places, strict=True):
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor)
            if edit.offset:
                new.add_(edit.offset * (edit.factor - 1))
        elif isinstance(edit, Rotation):
            _rotate(new, edit, power=1)
        else:
            precise = precision or new.dtype
            fill(Filling(new, old, edit, place, others, seed, inits, deviation, device, generators, precise))


def rotation(side: int, draw: int) -> Tensor:
    """A random orthogonal matrix. draw: the seed."""
    generator = torch.Generator().manual_seed(draw)
    orthogonal: Tensor = torch.linalg.qr(torch.randn(side, side, dtype=torch.float64, generator=generator))[0]
    return orthogonal


def _rotate(new: Tensor, edit: Rotation, power: int) -> None:
    """Multiply an axis by the transpose; squared gradients by its squared entries, as if gradients were independent."""
    if power:
        matrix = rotation(edit.side, edit.draw).T.pow(power).to(new)
        new.copy_(torch.tensordot(matrix, new.clone(), dims=([1], [edit.axis])).movedim(0, edit.axis))


def needs_deviation(edits: Sequence[Edit]) -> bool:
    return any(isinstance(edit, Insertion) and (edit.fill == "free" or edit.noise) for edit in edits)


def deviations(tensors: Sequence[Tensor]) -> list[float]:
    """Standard deviations of detached tensors. The host waits for the device once, not once per tensor.

    For large tensors on the CPU it is computed as √(mean x² − mean² x), which is faster there, unless too many digits cancel.
    """
    result = [0.0] * len(tensors)
    plain = {n: t for n, t in enumerate(map(reals, tensors)) if t.numel() > 1 and t.is_floating_point()}
    for n in [n for n, tensor in plain.items() if tensor.numel() >= MILLION and tensor.is_cpu]:
        mean, square = _means(plain[n])
        if mean**2 < 0.1 * square < math.inf:
            result[n] = math.sqrt(square - mean**2)
            del plain[n]
    for n, deviation in _read({n: _precise(tensor).std(correction=0) for n, tensor in plain.items()}).items():
        result[n] = deviation
    return result


def _means(tensor: Tensor) -> tuple[float, float]:
    """The mean of a tensor's values and of their squares, computed in pieces that stay in the cache."""
    total, squares = 0.0, 0.0
    for piece in tensor.reshape(-1).split(PIECE):
        values = _precise(piece)
        total += float(values.sum())
        squares += float(values @ values)
    return total / tensor.numel(), squares / tensor.numel()


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _read(scalars: Mapping[int, Tensor]) -> dict[int, float]:
    """Scalars as Python floats, with one transfer per device and dtype."""
    result: dict[int, float] = {}
    for kind in {(scalar.device, scalar.dtype) for scalar in scalars.values()}:
        here = {n: scalar for n, scalar in scalars.items() if (scalar.device, scalar.dtype) == kind}
        result.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return result


def grown_moment(old: Tensor, edits: Sequence[Edit], power: int, fresh: str, writes: Writes | None = None) -> Tensor:
    """Grow a tensor that transforms like the `power`-th power of a gradient.

    fresh: the start of new entries that are not copies, "zero" or "mean" (of the entries that exist by then, none of which is
    negative). writes: if given, the values may be in place after `writes.make()` only.
    """
    edits = edits_of(edits)
    new = _empty(old, edits)
    level = old if fresh == "mean" and old.numel() else None
    if edits.plain and (old.is_cuda or old.numel() < SMALL):  # fewer kernels are faster here, although they write more
        moved = slices(new, old, edits)
        if moved is not None and type(new) is Tensor:
            later = Writes() if writes is None else writes
            if edits.sizes:
                later.start(new, level)
            later.move(moved)
            if edits.factor != 1.0:
                later.scale(new, edits.factor ** (-power))
            if writes is None:
                later.make()
            return new
    start: float | Tensor = 0.0
    if level is not None:  # the mean stays on its device, so that the host does not wait for it
        start = old.to(torch.promote_types(old.dtype, torch.float32)).mean()
    _move(new, old, edits)
    _fill_moment(new, edits, power, start)
    return new


def _fill_moment(new: Tensor, edits: TensorEdits, power: int, start: float | Tensor) -> None:
    """Write the values of all edits into a grown moment, in order; the counterpart of `fill_values`."""
    for edit, place in zip(edits, edits.places, strict=True):
        at = place.at
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor ** (-power))
            start = start * edit.factor ** (-power)
            continue
        if isinstance(edit, Rotation):
            _rotate(new, edit, power)
            continue
        axis = edit.axis
        if edit.gradient:
            shares, keeps = [g**power for g in edit.gradient], [g**power for g in edit.gradient_keep]
            block = new.index_select(axis, index(place.sources, new))
            multiply(block, axis, np.arange(len(at)), shares)
            if keeps:
                multiply(new, axis, place.members, keeps)
            put(new, axis, at, block)
            start = start * ((sum(shares) + sum(keeps) + edit.size - len(keeps)) / edit.new_size)
        else:
            set_all(new, axis, place, start)
