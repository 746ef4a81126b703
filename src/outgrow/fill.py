"""Make the grown tensor: old numbers moved to their new places, new ones filled in, in one allocation.

The same edits act on gradients and optimizer moments, which transform like gradients: a copy that gets a share of its unit's
part gets that share of its gradient, and entries that are new start at zero, or at the mean of the existing ones for
second moments.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outgrow.errors import MethodError
from outgrow.plan import Edit, Insertion, Rescaling, Rotation

FEW = 16  # so many slices along an axis are quicker than one copy by index
MANY = 64  # more slices than this are slower than one copy by index
MILLION = 2**20
Positions = NDArray[np.int64]
Init = str | Callable[[Tensor, tuple[int, ...], torch.Generator], Tensor]


def grown(old: Tensor, edits: Sequence[Edit]) -> Tensor:
    """A tensor of the final shape with the old numbers in place; what is new is not filled yet."""
    shape = list(old.shape)
    where: dict[int, Positions] = {}
    for edit, (_, kept) in reversed(list(zip(edits, _places(edits), strict=True))):
        if isinstance(edit, Insertion):
            where[edit.axis] = kept
            shape[edit.axis] = max(shape[edit.axis], edit.new_size)
    channels_last = old.ndim == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    new = torch.empty(shape, dtype=old.dtype, device=old.device, memory_format=memory)
    scatter(new, old, where)
    return new


def scatter(new: Tensor, old: Tensor, where: Mapping[int, Positions]) -> None:
    """new[where…] = old, by slices where positions are ranges or a few of them (they almost always are)."""
    if not where:
        new.copy_(old)
        return
    runs = {axis: _runs(positions) for axis, positions in where.items()}
    axis = min(runs, key=lambda axis: len(runs[axis]))
    rest = {other: positions for other, positions in where.items() if other != axis}
    if len(runs[axis]) <= FEW:
        for start, first, count in runs[axis]:
            scatter(new.narrow(axis, first, count), old.narrow(axis, start, count), rest)
    elif not rest:
        new.index_copy_(axis, _index(where[axis], new), old)
    else:
        shape = [*new.shape[:axis], len(where[axis]), *new.shape[axis + 1 :]]
        inner = torch.empty(shape, dtype=old.dtype, device=old.device)
        scatter(inner, old, rest)
        new.index_copy_(axis, _index(where[axis], new), inner)


def _runs(positions: Positions) -> list[tuple[int, int, int]]:
    """Positions that follow each other without a gap: where such a run starts in the list, its first one, how many."""
    if _is_range(positions):
        return [(0, int(positions[0]), len(positions))]
    bounds = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(start, int(positions[start]), end - start) for start, end in pairwise(bounds) if start < end]


def _is_range(positions: Positions) -> bool:
    """Whether ascending positions follow each other without a gap."""
    return int(positions[-1]) - int(positions[0]) == len(positions) - 1


def _ascending(positions: Sequence[int]) -> Positions:
    if positions[-1] - positions[0] == len(positions) - 1:
        return np.arange(positions[0], positions[-1] + 1)
    return np.array(positions)


def _index(positions: Positions, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions)).to(like.device)


def _part(tensor: Tensor, axis: int, positions: Positions) -> Tensor:
    """The part at ascending positions: a view if they are a range, a copy otherwise."""
    if _is_range(positions):
        return tensor.narrow(axis, int(positions[0]), len(positions))
    return tensor.index_select(axis, _index(positions, tensor))


def _put(tensor: Tensor, axis: int, positions: Positions, block: Tensor) -> None:
    """tensor[positions] = block."""
    runs = _runs(positions)
    if len(runs) > FEW:
        tensor.index_copy_(axis, _index(positions, tensor), block.to(tensor.dtype).contiguous())
        return
    for start, first, count in runs:
        tensor.narrow(axis, first, count).copy_(block.narrow(axis, start, count))


def _fill(tensor: Tensor, axis: int, positions: Positions, number: float) -> None:
    if _is_range(positions):
        tensor.narrow(axis, int(positions[0]), len(positions)).fill_(number)
    else:
        tensor.index_fill_(axis, _index(positions, tensor), number)


def _multiply(tensor: Tensor, axis: int, positions: Positions, factors: Sequence[float]) -> None:
    """tensor[positions] *= factors."""
    if factors.count(1.0) == len(factors):
        return
    row = torch.tensor(factors, dtype=tensor.dtype, device=tensor.device).view(_along(axis, tensor.ndim))
    part = _part(tensor, axis, positions).mul_(row)
    if not _is_range(positions):
        _put(tensor, axis, positions, part)


def _along(axis: int, ndim: int) -> list[int]:
    return [-1 if a == axis else 1 for a in range(ndim)]


def _places(edits: Sequence[Edit]) -> list[tuple[Positions, Positions]]:
    """For each insertion, where the positions that it opens and those that it finds stand in the end, after all later ones."""
    places: list[tuple[Positions, Positions]] = []
    final: dict[int, Positions] = {}  # by axis
    for edit in reversed(edits):
        if not isinstance(edit, Insertion):
            places.append((np.arange(0), np.arange(0)))
            continue
        at = _ascending(edit.at)
        old = np.ones(edit.new_size, dtype=np.bool_)
        old[at] = False
        kept = np.flatnonzero(old)
        if edit.axis in final:
            at, kept = final[edit.axis][at], final[edit.axis][kept]
        places.append((at, kept))
        final[edit.axis] = kept
    return places[::-1]


def fill_values(
    new: Tensor,
    old: Tensor,
    edits: Sequence[Edit],
    others: Mapping[str, Tensor],
    seed: int,
    inits: Mapping[str, Init],
) -> None:
    """Write the numbers of all edits into a tensor made by `grown`, in order. `others`: old tensors by name."""
    if new.is_meta:  # a rehearsal: shapes are all there is
        return
    needed = any(isinstance(edit, Insertion) and (edit.fill == "free" or edit.noise) for edit in edits)
    deviation = _deviation(old) if needed else 0.0
    for edit, (at, kept) in zip(edits, _places(edits), strict=True):
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor).add_(edit.offset * (edit.factor - 1))
            continue
        if isinstance(edit, Rotation):
            _rotate(new, edit, power=1)
            continue
        axis = edit.axis
        if edit.keep:
            _multiply(new, axis, kept[_ascending(edit.members)], edit.keep)
        if edit.fill == "zero" or edit.fade:
            _fill(new, axis, at, 0.0)
        elif edit.fill == "one":
            _fill(new, axis, at, 1.0)
        elif edit.fill == "mean":
            _put(new, axis, at, _mean(new, edit, kept, others))
        elif edit.fill == "rowmean":
            rows = _part(new, axis, kept).mean(dim=list(range(1, new.ndim)), keepdim=True)
            _put(new, axis, at, rows.expand([len(at) if a == axis else size for a, size in enumerate(new.shape)]))
        elif edit.fill == "spread":
            _put(new, axis, at, _spread(new, edit, kept, seed))
        elif edit.fill == "copy":
            block = new.index_select(axis, _index(kept[list(edit.sources)], new))
            factors = edit.signs
            if edit.keep:  # the sources were just multiplied by what they keep
                kept_share = dict(zip(edit.members, edit.keep, strict=True))
                factors = tuple(sign / kept_share[source] for sign, source in zip(edit.signs, edit.sources, strict=True))
            _multiply(block, axis, np.arange(len(at)), factors)
            _put(new, axis, at, block)
        else:
            _draw(new, edit, at, old, deviation, seed, inits)
        if edit.noise:
            block = new.index_select(axis, _index(at, new))
            noise = torch.empty(block.shape, dtype=new.dtype, device=new.device)
            noise.normal_(0.0, edit.noise * deviation, generator=_generator(new, edit, seed + 1))
            _put(new, axis, at, block.add_(noise))


def _mean(new: Tensor, edit: Insertion, kept: Positions, others: Mapping[str, Tensor]) -> Tensor:
    """The mean of the old units, for each run of them and each position of a unit by itself."""
    axis = edit.axis
    part = _part(new, axis, kept[_ascending(edit.members)])
    apart: Tensor = part.unflatten(axis, (edit.runs, -1, edit.length))
    if edit.weights:
        apart = apart * others[edit.weights].reshape(-1).to(new).view(_along(axis + 1, apart.ndim))
    mean = apart.mean(dim=axis + 1, keepdim=True)
    copies = len(edit.at) // (edit.runs * edit.length)
    spread = mean.expand([copies if a == axis + 1 else size for a, size in enumerate(mean.shape)])
    return spread.flatten(axis, axis + 2)


def _spread(new: Tensor, edit: Insertion, kept: Positions, seed: int) -> Tensor:
    """Row mean ± draws, whose mean square in each row is the row's variance: mean and variance of the row stay as they are."""
    others = list(range(1, new.ndim))
    old = _part(new, edit.axis, kept)
    mean, variance = old.mean(dim=others, keepdim=True), old.var(dim=others, correction=0, keepdim=True)
    shape = [max(edit.draws) + 1 if a == edit.axis else size for a, size in enumerate(new.shape)]
    drawn = torch.empty(shape, dtype=new.dtype, device=new.device).uniform_(-1.0, 1.0, generator=_generator(new, edit, seed))
    drawn *= (variance / drawn.square().mean(dim=others, keepdim=True)).sqrt()
    block = drawn.index_select(edit.axis, _index(np.array(edit.draws), new))
    _multiply(block, edit.axis, np.arange(len(edit.draws)), edit.signs)
    return block + mean


def rotation(side: int, draw: int) -> Tensor:
    """An orthogonal matrix."""
    generator = torch.Generator().manual_seed(draw)
    orthogonal: Tensor = torch.linalg.qr(torch.randn(side, side, dtype=torch.float64, generator=generator))[0]
    return orthogonal


def _rotate(new: Tensor, edit: Rotation, power: int) -> None:
    """Along an axis by the transpose; squares of gradients by its squares, as if their entries were independent."""
    if power:
        matrix = rotation(edit.side, edit.draw).T.pow(power).to(new)
        new.copy_(torch.tensordot(matrix, new.clone(), dims=([1], [edit.axis])).movedim(0, edit.axis))


def _draw(
    new: Tensor, edit: Insertion, at: Positions, old: Tensor, deviation: float, seed: int, inits: Mapping[str, Init]
) -> None:
    """Draw free values, straight into their place where that is one slice, then lay out those that are drawn again."""
    axis, count = edit.axis, max(edit.draws) + 1
    shape = tuple(count if a == axis else size for a, size in enumerate(new.shape))
    init = inits.get(edit.init, edit.init.partition("*")[0])
    factor = float(edit.init.partition("*")[2] or 1.0)
    generator = _generator(new, edit, seed)
    draws, signs = np.array(edit.draws), np.array(edit.signs)
    plain = bool((draws[:count] == np.arange(count)).all() and (signs[:count] == 1.0).all())
    in_place = plain and _is_range(at[:count]) and new.is_contiguous() and not callable(init)
    if callable(init):
        given = init(old, shape, generator)
        if not isinstance(given, Tensor) or tuple(given.shape) != shape:
            found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise MethodError(f"init= gave {found} for {edit.tensor}: it must return a tensor of the shape it is told, {shape}")
        drawn = given.detach().to(new, copy=True)
    else:
        fan_in = math.prod(new.shape[1:]) if new.ndim > 1 else new.shape[0]
        fan_out = new.shape[0] * math.prod(new.shape[2:]) if new.ndim > 1 else new.shape[0]
        spread = {"he": math.sqrt(2 / fan_in), "xavier": math.sqrt(2 / (fan_in + fan_out))}.get(init, deviation)
        bound = spread * math.sqrt(3)
        drawn = _part(new, axis, at[:count]) if in_place else torch.empty(shape, dtype=new.dtype, device=new.device)
        drawn.uniform_(-bound, bound, generator=generator)
    if factor != 1.0:
        drawn.mul_(factor)
    done = count if in_place else 0
    pieces = list(_pieces(at, draws, signs, done))
    if len(pieces) > MANY:
        block = drawn.index_select(axis, _index(draws[done:], new))
        _multiply(block, axis, np.arange(len(at) - done), edit.signs[done:])
        return _put(new, axis, at[done:], block)
    for piece in pieces:
        source = _part(drawn, axis, draws[piece])
        sign = float(signs[piece.start])
        if sign == 1.0 or not _is_range(at[piece]):
            _put(new, axis, at[piece], source if sign == 1.0 else source * sign)
        else:
            torch.mul(source, sign, out=_part(new, axis, at[piece]))


def _pieces(at: Positions, draws: Positions, signs: NDArray[np.float64], start: int) -> Iterator[slice]:
    """From `start` on, runs of new entries that neighbouring draws fill with one sign."""
    jumps = (np.diff(at) != 1) | (np.diff(draws) != 1) | (np.diff(signs) != 0)
    bounds = [start, *(b for b in (np.flatnonzero(jumps) + 1).tolist() if b > start), len(at)]
    return (slice(a, b) for a, b in pairwise(bounds) if a < b)


def _generator(new: Tensor, edit: Insertion, seed: int) -> torch.Generator:
    """Depends on the tensor and the axis, not on the order in which tensors are visited."""
    generator = torch.Generator(device=new.device)
    return generator.manual_seed(zlib.crc32(f"{seed}/{edit.tensor}/{edit.axis}/{edit.size}".encode()))


def _deviation(old: Tensor) -> float:
    """The standard deviation. Of many numbers it is √(mean x² − mean² x), which is quicker, unless too much cancels there."""
    if old.numel() < 2 or not old.is_floating_point():
        return 0.0
    old = old.detach() if old.dtype == torch.float64 else old.detach().float()
    if old.numel() >= MILLION:
        numbers = old.reshape(-1)
        square, mean = float(numbers @ numbers) / old.numel(), float(old.mean())
        if mean**2 < 0.1 * square < math.inf:
            return math.sqrt(square - mean**2)
    return float(old.std(correction=0))


def fill_moment(new: Tensor, old: Tensor, edits: Sequence[Edit], power: int, fresh: str) -> None:
    """Like `fill_values`, for something that transforms like the `power`-th power of a gradient.

    fresh: what new entries that are not copies start at, "zero" or "mean" (of the entries that are there by then).
    """
    start = 0.0
    if fresh == "mean" and old.numel():
        start = old.to(torch.promote_types(old.dtype, torch.float32)).mean().item()
    for edit, (at, kept) in zip(edits, _places(edits), strict=True):
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor ** (-power))
            start *= edit.factor ** (-power)
            continue
        if isinstance(edit, Rotation):
            _rotate(new, edit, power)
            continue
        axis = edit.axis
        if edit.gradient:
            shares, keeps = [g**power for g in edit.gradient], [g**power for g in edit.gradient_keep]
            block = new.index_select(axis, _index(kept[list(edit.sources)], new))
            _multiply(block, axis, np.arange(len(at)), shares)
            if keeps:
                _multiply(new, axis, kept[_ascending(edit.members)], keeps)
            _put(new, axis, at, block)
            start *= (sum(shares) + sum(keeps) + edit.size - len(keeps)) / edit.new_size
        else:
            _fill(new, axis, at, start)
