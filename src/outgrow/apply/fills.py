"""The values of a tensor's new entries: one function per fill, all of them in the table `FILLS`.

An insertion names its fill (see `plan.Insertion`). When a fill runs, the old values and those of earlier insertions are in
place already.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outgrow.apply.final_positions import FinalPlace
from outgrow.apply.tensor_entries import along, index, multiply, part, put, reals, set_all
from outgrow.errors import MethodError
from outgrow.growth_plan.plan import Insertion

MOST_SLICES = 64  # more slices than this are slower than one copy by index
FANS = ("he", "xavier")
Init = str | Callable[[Tensor, tuple[int, ...], torch.Generator], Tensor]


class Generators:
    """One random generator per device, seeded again for each use: to make a new one takes longer."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, torch.Generator] = {}

    def seeded(self, device: torch.device, seed: int) -> torch.Generator:
        if device not in self._by_device:
            self._by_device[device] = torch.Generator(device=device)
        return self._by_device[device].manual_seed(seed)


class Filling(NamedTuple):
    """One insertion to carry out."""

    new: Tensor  # written to
    old: Tensor  # the values before the growth
    edit: Insertion
    place: FinalPlace
    others: Mapping[str, Tensor]  # old tensors by name
    seed: int
    inits: Mapping[str, Init]  # users' functions, by their names in the plan
    deviation: float  # standard deviation of the old values, if the fill needs it
    device: torch.device  # whose random generator draws
    generators: Generators
    precision: torch.dtype  # in which free values are drawn, before they are rounded to the dtype of `new`


def fill(filling: Filling) -> None:
    """Write the new entries of an insertion; old entries that share their contribution with copies are scaled first."""
    new, edit, place = filling.new, filling.edit, filling.place
    if edit.keep:
        multiply(new, edit.axis, place.members, edit.keep)
    FILLS["zero" if edit.fade else edit.fill](filling)
    if edit.noise:
        _add_noise(filling)


def _zero(filling: Filling) -> None:
    set_all(filling.new, filling.edit.axis, filling.place, 0.0)


def _one(filling: Filling) -> None:
    new, edit, place = filling.new, filling.edit, filling.place
    set_all(new, edit.axis, place, 1.0)
    if edit.signs:
        multiply(new, edit.axis, place.at, edit.signs)


def _mean(filling: Filling) -> None:
    """The mean over the old units, separately for each run of units and each position within a unit."""
    new, edit, axis = filling.new, filling.edit, filling.edit.axis
    apart: Tensor = part(new, axis, filling.place.members).unflatten(axis, (edit.runs, -1, edit.length))
    if edit.weights:
        apart = apart * filling.others[edit.weights].reshape(-1).to(new).view(along(axis + 1, apart.ndim))
    mean = apart.mean(dim=axis + 1, keepdim=True)
    copies = len(edit.at) // (edit.runs * edit.length)
    spread = mean.expand([copies if a == axis + 1 else size for a, size in enumerate(mean.shape)])
    put(new, axis, filling.place.at, spread.flatten(axis, axis + 2))


def _row_mean(filling: Filling) -> None:
    """The mean of all entries of a row of the weight."""
    new, axis, at = filling.new, filling.edit.axis, filling.place.at
    rows = part(new, axis, filling.place.kept).mean(dim=list(range(1, new.ndim)), keepdim=True)
    put(new, axis, at, rows.expand([len(at) if a == axis else size for a, size in enumerate(new.shape)]))


def _spread(filling: Filling) -> None:
    """Row mean ± draws whose mean square in each row is the row's variance: the row's mean and variance do not change."""
    new, edit, device = filling.new, filling.edit, filling.device
    others = list(range(1, new.ndim))
    old = part(new, edit.axis, filling.place.kept)
    mean, variance = old.mean(dim=others, keepdim=True), old.var(dim=others, correction=0, keepdim=True)
    shape = [max(edit.draws) + 1 if a == edit.axis else size for a, size in enumerate(new.shape)]
    drawn = torch.empty(shape, dtype=new.dtype, device=device).uniform_(-1.0, 1.0, generator=generator_of(filling))
    drawn = drawn.to(new.device)
    drawn *= (variance / drawn.square().mean(dim=others, keepdim=True)).sqrt()
    block = drawn.index_select(edit.axis, index(np.array(edit.draws), new))
    multiply(block, edit.axis, np.arange(len(edit.draws)), edit.signs)
    put(new, edit.axis, filling.place.at, block + mean)


def _copy(filling: Filling) -> None:
    """Copies of old entries, times their signs."""
    new, edit, axis, at = filling.new, filling.edit, filling.edit.axis, filling.place.at
    block = new.index_select(axis, index(filling.place.sources, new))
    factors = edit.signs
    if edit.keep:  # `fill` has just multiplied the sources by these factors
        kept = dict(zip(edit.members, edit.keep, strict=True))
        factors = tuple(sign / kept[source] for sign, source in zip(edit.signs, edit.sources, strict=True))
    multiply(block, axis, np.arange(len(at)), factors)
    put(new, axis, at, block)


def _free(filling: Filling) -> None:
    """Draw free values, directly in place if they form one slice, then write the entries that repeat a draw."""
    new, edit, place = filling.new, filling.edit, filling.place
    axis, drawing = edit.axis, place.drawing
    name, _, factor = edit.init.partition("*")
    init = filling.inits.get(name, name)
    if callable(init):
        done, drawn = 0, _given(init, filling, _shape_of_draws(filling)).to(new, copy=True)
    else:
        bound = _deviation(init, new, filling.deviation) * math.sqrt(3)
        bound /= math.sqrt(2) if new.is_complex() and init in FANS else 1.0  # real and imaginary part
        direct = filling.device == new.device and new.is_contiguous() and filling.precision == new.dtype
        done = drawing.direct if direct else 0
        if done:  # all draws, in place
            drawn = new.narrow(axis, drawing.first, done)
        else:
            drawn = torch.empty(_shape_of_draws(filling), dtype=filling.precision, device=filling.device)
        reals(drawn).uniform_(-bound, bound, generator=generator_of(filling))
        drawn = drawn if done else drawn.to(new.device)
    if factor and float(factor) != 1.0:
        drawn.mul_(float(factor))
    runs = drawing.rest if done == drawing.direct else drawing.runs_from(done)
    if len(runs) > MOST_SLICES:
        block = drawn.index_select(axis, index(drawing.draws[done:], new))
        multiply(block, axis, np.arange(len(place.at) - done), edit.signs[done:])
        return put(new, axis, place.at[done:], block)
    for first, start, count, sign in runs:
        source, target = drawn.narrow(axis, first, count), new.narrow(axis, start, count)
        if sign == 1.0:
            target.copy_(source)
        else:
            torch.mul(source, sign, out=target)


def _shape_of_draws(filling: Filling) -> tuple[int, ...]:
    count = filling.place.drawing.count
    return tuple(count if axis == filling.edit.axis else size for axis, size in enumerate(filling.new.shape))


def _given(init: Callable[..., Tensor], filling: Filling, shape: tuple[int, ...]) -> Tensor:
    """The values that a user's function returns; refused unless they have the requested shape."""
    generator = generator_of(filling._replace(generators=Generators()))  # a new one, which the function may keep
    try:
        given = init(filling.old, shape, generator)
    except Exception as error:
        name = getattr(init, "__qualname__", type(init).__name__)
        raise MethodError(
            f"init={name} failed for {filling.edit.tensor} with {type(error).__name__}: {error}; it is called as "
            "init(old, shape, generator) and returns a tensor of that shape"
        ) from error
    if not isinstance(given, Tensor) or tuple(given.shape) != shape:
        found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        tensor = filling.edit.tensor
        raise MethodError(f"init= gave {found} for {tensor}: it must return a tensor of the requested shape {shape}")
    return given.detach()


def _deviation(init: str, new: Tensor, of_old: float) -> float:
    """The standard deviation of a tensor's draws. of_old: the standard deviation of its old values."""
    if init not in FANS:
        return of_old
    fan_in = math.prod(new.shape[1:]) if new.ndim > 1 else new.shape[0]
    fan_out = new.shape[0] * math.prod(new.shape[2:]) if new.ndim > 1 else new.shape[0]
    return math.sqrt(2 / (fan_in if init == "he" else fan_in + fan_out))


def _add_noise(filling: Filling) -> None:
    new, edit, at = filling.new, filling.edit, filling.place.at
    block = new.index_select(edit.axis, index(at, new))
    noise = torch.empty(block.shape, dtype=new.dtype, device=filling.device)
    reals(noise).normal_(0.0, edit.noise * filling.deviation, generator=generator_of(filling, 1))
    put(new, edit.axis, at, block.add_(noise.to(new.device)))


def generator_of(filling: Filling, more: int = 0) -> torch.Generator:
    """A generator whose seed depends on the tensor and the axis, not on the order in which tensors are visited."""
    edit = filling.edit
    seed = zlib.crc32(f"{filling.seed + more}/{edit.tensor}/{edit.axis}/{edit.size}".encode())
    return filling.generators.seeded(filling.device, seed)


FILLS: Mapping[str, Callable[[Filling], None]] = {
    "free": _free,
    "zero": _zero,
    "one": _one,
    "mean": _mean,
    "rowmean": _row_mean,
    "spread": _spread,
    "copy": _copy,
}
