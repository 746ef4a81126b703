"""Make the grown tensor: old numbers moved to their new places, new ones filled in, in one allocation.

The same edits act on gradients and optimizer moments, which transform like gradients: a copy that gets a share of its unit's
part gets that share of its gradient, and entries that are new start at zero, or at the mean of the existing ones for
second moments.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outgrow.plan import Insertion, Rescaling

Init = str | Callable[[Tensor, tuple[int, ...], torch.Generator], Tensor]


def grown(old: Tensor, edits: Sequence[Insertion | Rescaling]) -> Tensor:
    """A tensor of the final shape with the old numbers in place; what is new is not filled yet."""
    shape = list(old.shape)
    where: dict[int, Tensor] = {}
    for edit, place in reversed(list(zip(edits, _places(edits, old.device), strict=True))):
        if isinstance(edit, Insertion):
            where[edit.axis] = place[_kept(edit, old.device)]
            shape[edit.axis] = max(shape[edit.axis], edit.new_size)
    channels_last = old.ndim == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    new = torch.empty(shape, dtype=old.dtype, device=old.device, memory_format=memory)
    if not where:
        return new.copy_(old)
    scatter(new, old, where)
    return new


def scatter(new: Tensor, old: Tensor, where: Mapping[int, Tensor]) -> None:
    """new[where…] = old, by slices where positions are ranges (they almost always are)."""
    view, pending = new, dict(where)
    for axis, positions in where.items():
        first, count = int(positions[0]), len(positions)
        if int(positions[-1]) - first == count - 1:
            view = view.narrow(axis, first, count)
            del pending[axis]
    if not pending:
        view.copy_(old)
    elif len(pending) == 1:
        ((axis, positions),) = pending.items()
        view.index_copy_(axis, positions, old)
    else:
        (axis, positions), *rest = pending.items()
        inner = torch.empty([*view.shape[:axis], len(positions), *view.shape[axis + 1 :]], dtype=old.dtype, device=old.device)
        scatter(inner, old, dict(rest))
        view.index_copy_(axis, positions, inner)


def _kept(edit: Insertion, device: torch.device) -> Tensor:
    mask = torch.ones(edit.new_size, dtype=torch.bool)
    mask[list(edit.at)] = False
    return mask.nonzero().squeeze(1).to(device)


def _places(edits: Sequence[Insertion | Rescaling], device: torch.device) -> list[Tensor]:
    """For each insertion, where the positions that it leaves stand in the end, after all later ones on its axis."""
    places: list[Tensor] = []
    final: dict[int, Tensor] = {}  # by axis
    for edit in reversed(edits):
        if isinstance(edit, Rescaling):
            places.append(torch.empty(0))
            continue
        place = final.setdefault(edit.axis, torch.arange(edit.new_size, device=device))
        places.append(place)
        final[edit.axis] = place[_kept(edit, device)]
    return places[::-1]


def fill_values(
    new: Tensor,
    old: Tensor,
    edits: Sequence[Insertion | Rescaling],
    others: Mapping[str, Tensor],
    seed: int,
    inits: Mapping[str, Init],
) -> None:
    """Write the numbers of all edits into a tensor made by `grown`, in order. `others`: old tensors by name."""
    deviation = _deviation(old)
    for edit, place in zip(edits, _places(edits, new.device), strict=True):
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor)
            continue
        axis, at = edit.axis, place[list(edit.at)]
        kept = place[_kept(edit, new.device)]
        if edit.keep:
            members = kept[torch.tensor(edit.members, device=new.device)]
            _multiply(new, axis, members, edit.keep)
        if edit.fill == "zero":
            block = torch.zeros_like(new.narrow(axis, 0, len(at)))
        elif edit.fill == "one":
            block = torch.ones_like(new.narrow(axis, 0, len(at)))
        elif edit.fill == "mean":
            block = _mean(new, edit, kept, others)
        elif edit.fill == "rowmean":
            lost = list(range(1, new.ndim))
            rows = new.index_select(axis, kept).mean(dim=lost, keepdim=True)
            block = rows.expand([*rows.shape[:axis], len(at), *rows.shape[axis + 1 :]]).expand_as(new.narrow(axis, 0, len(at)))
        elif edit.fill == "spread":
            block = _spread(new, edit, kept, seed)
        elif edit.fill == "copy":
            sources = kept[torch.tensor(edit.sources, device=new.device)]
            block = new.index_select(axis, sources)
            factors = edit.signs
            if edit.keep:  # the sources were just multiplied by what they keep
                kept_share = dict(zip(edit.members, edit.keep, strict=True))
                factors = tuple(sign / kept_share[source] for sign, source in zip(edit.signs, edit.sources, strict=True))
            _multiply(block, axis, torch.arange(len(at), device=new.device), factors)
        else:
            block = _draw(new, edit, old, deviation, seed, inits)
        if edit.noise:
            noise = torch.empty(block.shape, dtype=new.dtype, device=new.device)
            block = block + noise.normal_(0.0, edit.noise * deviation, generator=_generator(new, edit, seed + 1))
        new.index_copy_(axis, at, block.to(new.dtype).contiguous())


def _multiply(tensor: Tensor, axis: int, positions: Tensor, factors: Sequence[float]) -> None:
    if any(factor != 1.0 for factor in factors):
        row = torch.tensor(factors, dtype=tensor.dtype, device=tensor.device)
        row = row.view([-1 if a == axis else 1 for a in range(tensor.ndim)])
        tensor.index_copy_(axis, positions, tensor.index_select(axis, positions) * row)


def _mean(new: Tensor, edit: Insertion, kept: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    """The mean of the old units, for each run of them and each position of a unit by itself."""
    axis = edit.axis
    part = new.index_select(axis, kept[torch.tensor(edit.members, device=new.device)])
    apart = part.unflatten(axis, (edit.runs, -1, edit.length))
    if edit.weights:
        weights = others[edit.weights].reshape(-1).to(new)
        apart = apart * weights.view([-1 if a == axis + 1 else 1 for a in range(apart.ndim)])
    mean = apart.mean(dim=axis + 1, keepdim=True)
    copies = len(edit.at) // (edit.runs * edit.length)
    return mean.expand([copies if a == axis + 1 else size for a, size in enumerate(mean.shape)]).flatten(axis, axis + 2)


def _spread(new: Tensor, edit: Insertion, kept: Tensor, seed: int) -> Tensor:
    """Row mean ± draws, whose mean square in each row is the row's variance: mean and variance of the row stay as they are."""
    lost = list(range(1, new.ndim))
    old = new.index_select(edit.axis, kept)
    mean, variance = old.mean(dim=lost, keepdim=True), old.var(dim=lost, correction=0, keepdim=True)
    shape = [max(edit.draws) + 1 if a == edit.axis else size for a, size in enumerate(new.shape)]
    drawn = torch.empty(shape, dtype=new.dtype, device=new.device).uniform_(-1.0, 1.0, generator=_generator(new, edit, seed))
    drawn *= (variance / drawn.square().mean(dim=lost, keepdim=True)).sqrt()
    block = drawn.index_select(edit.axis, torch.tensor(edit.draws, device=new.device))
    _multiply(block, edit.axis, torch.arange(len(edit.draws), device=new.device), edit.signs)
    return block + mean


def _draw(new: Tensor, edit: Insertion, old: Tensor, deviation: float, seed: int, inits: Mapping[str, Init]) -> Tensor:
    count = max(edit.draws) + 1
    shape = tuple(count if a == edit.axis else size for a, size in enumerate(new.shape))
    init = inits.get(edit.init, edit.init.partition("*")[0])
    factor = float(edit.init.partition("*")[2] or 1.0)
    generator = _generator(new, edit, seed)
    if callable(init):
        drawn = init(old, shape, generator).to(new)
    else:
        fan_in = math.prod(new.shape[1:]) if new.ndim > 1 else new.shape[0]
        fan_out = new.shape[0] * math.prod(new.shape[2:]) if new.ndim > 1 else new.shape[0]
        spread = {"he": math.sqrt(2 / fan_in), "xavier": math.sqrt(2 / (fan_in + fan_out))}.get(init, deviation)
        drawn = torch.empty(shape, dtype=new.dtype, device=new.device)
        bound = spread * math.sqrt(3)
        drawn.uniform_(-bound, bound, generator=generator)
    drawn.mul_(factor)
    if edit.draws == tuple(range(count)) and all(sign == 1.0 for sign in edit.signs):
        return drawn
    block = drawn.index_select(edit.axis, torch.tensor(edit.draws, device=new.device))
    _multiply(block, edit.axis, torch.arange(len(edit.draws), device=new.device), edit.signs)
    return block


def _generator(new: Tensor, edit: Insertion, seed: int) -> torch.Generator:
    """Depends on the tensor and the axis, not on the order in which tensors are visited."""
    generator = torch.Generator(device=new.device)
    return generator.manual_seed(zlib.crc32(f"{seed}/{edit.tensor}/{edit.axis}/{edit.size}".encode()))


def _deviation(old: Tensor) -> float:
    if old.numel() < 2 or not old.is_floating_point():
        return 0.0
    return float(old.detach().float().std(correction=0)) if old.dtype != torch.float64 else float(old.std(correction=0))


def fill_moment(new: Tensor, old: Tensor, edits: Sequence[Insertion | Rescaling], power: int, fresh: str) -> None:
    """Like `fill_values`, for something that transforms like the `power`-th power of a gradient.

    fresh: what new entries that are not copies start at, "zero" or "mean" (of the entries that are there by then).
    """
    start = 0.0
    if fresh == "mean" and old.numel():
        start = old.to(torch.promote_types(old.dtype, torch.float32)).mean().item()
    for edit, place in zip(edits, _places(edits, new.device), strict=True):
        if isinstance(edit, Rescaling):
            new.mul_(edit.factor ** (-power))
            start *= edit.factor ** (-power)
            continue
        axis, at = edit.axis, place[list(edit.at)]
        kept = place[_kept(edit, new.device)]
        if edit.gradient:
            shares, keeps = [g**power for g in edit.gradient], [g**power for g in edit.gradient_keep]
            sources = kept[torch.tensor(edit.sources, device=new.device)]
            block = new.index_select(axis, sources)
            _multiply(block, axis, torch.arange(len(at), device=new.device), shares)
            if keeps:
                members = kept[torch.tensor(edit.members, device=new.device)]
                _multiply(new, axis, members, keeps)
            new.index_copy_(axis, at, block)
            start *= (sum(shares) + sum(keeps) + edit.size - len(keeps)) / edit.new_size
        else:
            new.index_fill_(axis, at, start)
