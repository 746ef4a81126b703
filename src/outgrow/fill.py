"""Make the grown tensor: old numbers moved to their new places, new ones filled in, in one allocation.

The same edits act on gradients and optimizer moments, which transform like gradients: a copy that gets a share of its unit's
part gets that share of its gradient, and entries that are new start at zero, or at the mean of the existing ones for
second moments.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from outgrow.errors import MethodError
from outgrow.plan import Edit, Insertion, Rescaling, Rotation
from outgrow.positions import FEW, Place, Positions, TensorEdits, edits_of, is_range, runs

MANY = 64  # more slices than this are slower than one copy by index
MILLION = 2**20
SMALL = 2**14  # values: to write all of them takes no longer than to call a function
FANS = ("he", "xavier")
Init = str | Callable[[Tensor, tuple[int, ...], torch.Generator], Tensor]


def grown(old: Tensor, edits: Sequence[Edit]) -> Tensor:
    """A tensor of the final shape with the old values in place; new entries are not filled yet."""
    edits = edits_of(edits)
    new = _empty(old, edits)
    _move(new, old, edits)
    return new


def _empty(old: Tensor, edits: TensorEdits) -> Tensor:
    shape = list(old.shape)
    for axis, size in edits.sizes.items():
        shape[axis] = max(shape[axis], size)
    if old.is_contiguous() and not _pinned(old):
        return old.new_empty(shape)
    return torch.empty(shape, dtype=old.dtype, device=old.device, memory_format=_memory_format(old), pin_memory=_pinned(old))


def _move(new: Tensor, old: Tensor, edits: TensorEdits) -> None:
    """Copy the old values to their new places."""
    if edits.moves is None:
        return scatter(new, old, edits.where)
    if len(edits.moves) == 1 and type(new) is Tensor:  # one block: a view of it in one call
        strides = new.stride()
        offset = sum(after * strides[axis] for axis, _, after, _ in edits.moves[0])
        new.as_strided(old.shape, strides, offset).copy_(old)
        return
    for move in edits.moves:
        source, target = old, new
        for axis, before, after, count in move:
            if count < new.shape[axis]:
                target = target.narrow(axis, after, count)
            if count < old.shape[axis]:
                source = source.narrow(axis, before, count)
        target.copy_(source)


def _memory_format(old: Tensor) -> torch.memory_format:
    usual = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.ndim)
    last = usual is not None and not old.is_contiguous() and old.is_contiguous(memory_format=usual)
    return usual if usual is not None and last else torch.contiguous_format


def _pinned(old: Tensor) -> bool:
    """Whether a tensor lies in memory from which a GPU copies by itself."""
    return old.device.type == "cpu" and torch.cuda.is_initialized() and old.is_pinned()


def scatter(new: Tensor, old: Tensor, where: Mapping[int, Positions]) -> None:
    """new[where…] = old, for positions that are in many pieces."""
    if not where:
        new.copy_(old)
        return
    pieces = {axis: runs(positions) for axis, positions in where.items()}
    axis = min(pieces, key=lambda axis: len(pieces[axis]))
    rest = {other: positions for other, positions in where.items() if other != axis}
    if len(pieces[axis]) <= FEW:
        for start, first, count in pieces[axis]:
            scatter(new.narrow(axis, first, count), old.narrow(axis, start, count), rest)
    elif not rest:
        new.index_copy_(axis, _index(where[axis], new), old)
    else:
        shape = [*new.shape[:axis], len(where[axis]), *new.shape[axis + 1 :]]
        inner = torch.empty(shape, dtype=old.dtype, device=old.device)
        scatter(inner, old, rest)
        new.index_copy_(axis, _index(where[axis], new), inner)


def _index(positions: Positions, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(positions)).to(like.device)


def _part(tensor: Tensor, axis: int, positions: Positions) -> Tensor:
    """The part at ascending positions: a view if they are a range, a copy otherwise."""
    if is_range(positions):
        return tensor.narrow(axis, int(positions[0]), len(positions))
    return tensor.index_select(axis, _index(positions, tensor))


def _put(tensor: Tensor, axis: int, positions: Positions, block: Tensor) -> None:
    """tensor[positions] = block."""
    pieces = runs(positions)
    if len(pieces) > FEW:
        tensor.index_copy_(axis, _index(positions, tensor), block.to(tensor.dtype).contiguous())
        return
    for start, first, count in pieces:
        tensor.narrow(axis, first, count).copy_(block.narrow(axis, start, count))


def _fill(tensor: Tensor, axis: int, place: Place, value: float | Tensor) -> None:
    """Give all new entries of a place one value."""
    if place.span is not None:
        tensor.narrow(axis, *place.span).fill_(value)
    else:
        tensor.index_fill_(axis, _index(place.at, tensor), value)


def _multiply(tensor: Tensor, axis: int, positions: Positions, factors: Sequence[float]) -> None:
    """tensor[positions] *= factors."""
    if factors.count(1.0) == len(factors):
        return
    row = torch.tensor(factors, dtype=tensor.dtype, device=tensor.device).view(_along(axis, tensor.ndim))
    part = _part(tensor, axis, positions).mul_(row)
    if not is_range(positions):
        _put(tensor, axis, positions, part)


def _along(axis: int, ndim: int) -> list[int]:
    return [-1 if a == axis else 1 for a in range(ndim)]


def fill_values(
    new: Tensor,
    old: Tensor,
    edits: Sequence[Edit],
    others: Mapping[str, Tensor],
    seed: int,
    inits: Mapping[str, Init],
    deviation: float | None = None,
    draws_on: torch.device | None = None,
) -> None:
    """Write the values of all edits into a tensor made by `grown`, in order.

    others: old tensors by name. deviation: the standard deviation of the old values, if it is known and needed.
    draws_on: the device whose random numbers are drawn, if it is not the tensor's own: each kind of device has others.
    """
    if new.is_meta:  # a rehearsal: shapes are all there is
        return
    edits = edits_of(edits)
    if deviation is None:
        deviation = deviations([old])[0] if needs_deviation(edits) else 0.0
    for edit, place in zip(edits, edits.places, strict=True):
        at, kept = place.at, place.kept
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor).add_(edit.offset * (edit.factor - 1))
            continue
        if isinstance(edit, Rotation):
            _rotate(new, edit, power=1)
            continue
        axis = edit.axis
        if edit.keep:
            _multiply(new, axis, place.members, edit.keep)
        if edit.fill == "zero" or edit.fade:
            _fill(new, axis, place, 0.0)
        elif edit.fill == "one":
            _fill(new, axis, place, 1.0)
        elif edit.fill == "mean":
            _put(new, axis, at, _mean(new, edit, place, others))
        elif edit.fill == "rowmean":
            rows = _part(new, axis, kept).mean(dim=list(range(1, new.ndim)), keepdim=True)
            _put(new, axis, at, rows.expand([len(at) if a == axis else size for a, size in enumerate(new.shape)]))
        elif edit.fill == "spread":
            _put(new, axis, at, _spread(new, edit, kept, seed, draws_on or new.device))
        elif edit.fill == "copy":
            block = new.index_select(axis, _index(place.sources, new))
            factors = edit.signs
            if edit.keep:  # the sources were just multiplied by what they keep
                kept_share = dict(zip(edit.members, edit.keep, strict=True))
                factors = tuple(sign / kept_share[source] for sign, source in zip(edit.signs, edit.sources, strict=True))
            _multiply(block, axis, np.arange(len(at)), factors)
            _put(new, axis, at, block)
        else:
            _draw(new, edit, place, old, deviation, seed, inits, draws_on or new.device)
        if edit.noise:
            block = new.index_select(axis, _index(at, new))
            noise = torch.empty(block.shape, dtype=new.dtype, device=draws_on or new.device)
            _reals(noise).normal_(0.0, edit.noise * deviation, generator=_generator(noise.device, edit, seed + 1))
            _put(new, axis, at, block.add_(noise.to(new.device)))


def _mean(new: Tensor, edit: Insertion, place: Place, others: Mapping[str, Tensor]) -> Tensor:
    """The mean of the old units, for each run of them and each position of a unit by itself."""
    axis = edit.axis
    part = _part(new, axis, place.members)
    apart: Tensor = part.unflatten(axis, (edit.runs, -1, edit.length))
    if edit.weights:
        apart = apart * others[edit.weights].reshape(-1).to(new).view(_along(axis + 1, apart.ndim))
    mean = apart.mean(dim=axis + 1, keepdim=True)
    copies = len(edit.at) // (edit.runs * edit.length)
    spread = mean.expand([copies if a == axis + 1 else size for a, size in enumerate(mean.shape)])
    return spread.flatten(axis, axis + 2)


def _spread(new: Tensor, edit: Insertion, kept: Positions, seed: int, device: torch.device) -> Tensor:
    """Row mean ± draws, whose mean square in each row is the row's variance: mean and variance of the row stay as they are."""
    others = list(range(1, new.ndim))
    old = _part(new, edit.axis, kept)
    mean, variance = old.mean(dim=others, keepdim=True), old.var(dim=others, correction=0, keepdim=True)
    shape = [max(edit.draws) + 1 if a == edit.axis else size for a, size in enumerate(new.shape)]
    drawn = torch.empty(shape, dtype=new.dtype, device=device).uniform_(-1.0, 1.0, generator=_generator(device, edit, seed))
    drawn = drawn.to(new.device)
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
    new: Tensor,
    edit: Insertion,
    place: Place,
    old: Tensor,
    deviation: float,
    seed: int,
    inits: Mapping[str, Init],
    device: torch.device,
) -> None:
    """Draw free values, straight into their place where that is one slice, then lay out those that are drawn again."""
    axis, drawing = edit.axis, place.drawing
    init = inits.get(edit.init, edit.init.partition("*")[0])
    factor = float(edit.init.partition("*")[2] or 1.0)
    generator = _generator(device, edit, seed)
    done = drawing.direct if new.is_contiguous() and not callable(init) and device == new.device else 0
    if done:  # all draws, in place
        drawn = new.narrow(axis, drawing.first, done)
    else:
        shape = tuple(drawing.count if a == axis else size for a, size in enumerate(new.shape))
        drawn = (
            _given(init, old, shape, generator, edit).to(new, copy=True)
            if callable(init)
            else new.new_empty(shape, device=device)
        )
    if not callable(init):
        bound = _deviation(init, new, deviation) * math.sqrt(3)
        bound /= math.sqrt(2) if new.is_complex() and init in FANS else 1.0  # real and imaginary part
        _reals(drawn).uniform_(-bound, bound, generator=generator)
        drawn = drawn.to(new.device)
    if factor != 1.0:
        drawn.mul_(factor)
    pieces = drawing.rest if done == drawing.direct else drawing.pieces(done)
    if len(pieces) > MANY:
        block = drawn.index_select(axis, _index(drawing.draws[done:], new))
        _multiply(block, axis, np.arange(len(place.at) - done), edit.signs[done:])
        return _put(new, axis, place.at[done:], block)
    for first, target, count, sign in pieces:
        source, part = drawn.narrow(axis, first, count), new.narrow(axis, target, count)
        if sign == 1.0:
            part.copy_(source)
        else:
            torch.mul(source, sign, out=part)


def _given(
    init: Callable[..., Tensor], old: Tensor, shape: tuple[int, ...], generator: torch.Generator, edit: Insertion
) -> Tensor:
    """The values of a user's function, which must have the shape that it is given."""
    given = init(old, shape, generator)
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise MethodError(f"init= gave {found} for {edit.tensor}: it must return a tensor of the shape it is told, {shape}")
    return given.detach()


def _deviation(init: str, new: Tensor, of_old: float) -> float:
    """The standard deviation of draws for a tensor; `of_old`: that of its old values."""
    if init not in FANS:
        return of_old
    fan_in = math.prod(new.shape[1:]) if new.ndim > 1 else new.shape[0]
    fan_out = new.shape[0] * math.prod(new.shape[2:]) if new.ndim > 1 else new.shape[0]
    return math.sqrt(2 / (fan_in if init == "he" else fan_in + fan_out))


def _generator(device: torch.device, edit: Insertion, seed: int) -> torch.Generator:
    """Depends on the tensor and the axis, not on the order in which tensors are visited."""
    generator = torch.Generator(device=device)
    return generator.manual_seed(zlib.crc32(f"{seed}/{edit.tensor}/{edit.axis}/{edit.size}".encode()))


def _reals(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, which are drawn one by one."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def needs_deviation(edits: Sequence[Edit]) -> bool:
    return any(isinstance(edit, Insertion) and (edit.fill == "free" or edit.noise) for edit in edits)


def deviations(tensors: Sequence[Tensor]) -> list[float]:
    """Standard deviations. All are computed before one is read, so that a device is waited for once, not once per tensor.

    Of many values it is √(mean x² − mean² x), which is quicker, unless too much cancels there.
    """
    result = [0.0] * len(tensors)
    reals = [_reals(tensor.detach()) for tensor in tensors]
    values = {n: _precise(t) for n, t in enumerate(reals) if t.numel() > 1 and t.is_floating_point()}
    large = {n: value for n, value in values.items() if value.numel() >= MILLION}
    squares = _read({n: value.reshape(-1) @ value.reshape(-1) for n, value in large.items()})
    means = _read({n: value.mean() for n, value in large.items()})
    for n, value in large.items():
        square, mean = squares[n] / value.numel(), means[n]
        if mean**2 < 0.1 * square < math.inf:
            result[n] = math.sqrt(square - mean**2)
            del values[n]
    for n, deviation in _read({n: value.std(correction=0) for n, value in values.items()}).items():
        result[n] = deviation
    return result


def _precise(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()


def _read(scalars: Mapping[int, Tensor]) -> dict[int, float]:
    """Scalars as Python numbers, by one transfer per device and type."""
    result: dict[int, float] = {}
    for kind in {(scalar.device, scalar.dtype) for scalar in scalars.values()}:
        here = {n: scalar for n, scalar in scalars.items() if (scalar.device, scalar.dtype) == kind}
        result.update(zip(here, torch.stack(list(here.values())).tolist(), strict=True))
    return result


def grown_moment(old: Tensor, edits: Sequence[Edit], power: int, fresh: str) -> Tensor:
    """Grow something that transforms like the `power`-th power of a gradient.

    fresh: what new entries that are not copies start at, "zero" or "mean" (of the entries that are there by then).
    """
    edits = edits_of(edits)
    start: float | Tensor = 0.0
    if fresh == "mean" and old.numel():  # it stays on its device, which is not waited for
        start = old.to(torch.promote_types(old.dtype, torch.float32)).mean()
    new = _empty(old, edits)
    if edits.plain and (old.is_cuda or old.numel() < SMALL):  # few calls and kernels: their number counts, not what they write
        _move(new.fill_(start) if isinstance(start, Tensor) else new.zero_(), old, edits)
        return new
    _move(new, old, edits)
    _fill_moment(new, edits, power, start)
    return new


def _fill_moment(new: Tensor, edits: TensorEdits, power: int, start: float | Tensor) -> None:
    """Like `fill_values`: write what all edits make of a moment, in order."""
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
            block = new.index_select(axis, _index(place.sources, new))
            _multiply(block, axis, np.arange(len(at)), shares)
            if keeps:
                _multiply(new, axis, place.members, keeps)
            _put(new, axis, at, block)
            start = start * ((sum(shares) + sum(keeps) + edit.size - len(keeps)) / edit.new_size)
        else:
            _fill(new, axis, place, start)
