"""Writes into grown tensors, collected and made with few calls.

On a GPU, and for small tensors, the calls take longer than the values that they write. One call for a list of tensors takes the
place of one per tensor. The order is always the same: all entries of a tensor get a start, the old values move to their places,
and everything is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outgrow.apply.final_positions import TensorEdits

EXACT = (torch.float32, torch.float64)  # dtypes in which sums of many values are accurate
MANY = 64  # copies
SliceCopy = tuple[Tensor, Tensor]  # a view of the new tensor, and one of the old


class Writes:
    """Writes that wait for `make`. Until then the new tensors hold nothing.

    Example:
        >>> new, writes = torch.empty(3), Writes()
        >>> writes.start(new, None)
        >>> writes.move([(new[:2], torch.ones(2))])
        >>> writes.scale(new, 0.5)
        >>> writes.make()
        >>> new
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self) -> None:
        self._zeros: list[Tensor] = []
        self._levels: list[tuple[Tensor, Tensor]] = []
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._scaled: list[tuple[Tensor, float]] = []

    def start(self, new: Tensor, mean_of: Tensor | None) -> None:
        """Start all entries at zero, or at the mean of a tensor without negative values."""
        if mean_of is None:
            self._zeros.append(new)
        else:
            self._levels.append((new, mean_of))

    def move(self, slices: Sequence[SliceCopy]) -> None:
        for target, source in slices:
            self._targets.append(target)
            self._sources.append(source)

    def scale(self, new: Tensor, factor: float) -> None:
        self._scaled.append((new, factor))

    def make_if_many(self) -> None:
        """Make the writes so far if they are many: a GPU then works on them while the next ones are collected."""
        if len(self._targets) >= MANY:
            self.make()

    def make(self) -> None:
        """Make all writes."""
        for alike in _by_kind(self._zeros):
            torch._foreach_zero_([self._zeros[n] for n in alike])
        for (new, _), mean in zip(self._levels, _means([old for _, old in self._levels]), strict=True):
            new.fill_(mean)
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for alike in _by_kind([new for new, _ in self._scaled]):
            torch._foreach_mul_([self._scaled[n][0] for n in alike], [self._scaled[n][1] for n in alike])
        for made in (self._zeros, self._levels, self._targets, self._sources, self._scaled):
            made.clear()


def slices(new: Tensor, old: Tensor, edits: TensorEdits) -> list[SliceCopy] | None:
    """The slices that bring the old values to their places; None if there are too many of them."""
    if edits.moves is None:
        return None
    if len(edits.moves) == 1 and type(new) is Tensor:  # one block: a view of it in one call
        strides = new.stride()
        offset = 0
        for axis, _, after, _ in edits.moves[0]:
            offset += after * strides[axis]
        return [(new.as_strided(old.shape, strides, offset), old)]
    found = []
    for move in edits.moves:
        source, target = old, new
        for axis, before, after, count in move:
            if count < new.shape[axis]:
                target = target.narrow(axis, after, count)
            if count < old.shape[axis]:
                source = source.narrow(axis, before, count)
        found.append((target, source))
    return found


def _means(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Means of tensors without negative values. They stay on their devices, so that the host does not wait for them.

    On a GPU, the sum of such a tensor is its 1-norm, which one call computes for many tensors.
    """
    result = [Tensor()] * len(tensors)
    for alike in _by_kind(tensors):
        here = [tensors[n] for n in alike]
        if here[0].is_cuda and here[0].dtype in EXACT:
            found = list(torch._foreach_div(torch._foreach_norm(here, 1), [float(tensor.numel()) for tensor in here]))
        else:
            found = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)).mean() for tensor in here]
        for n, mean in zip(alike, found, strict=True):
            result[n] = mean
    return result


def _by_kind(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors with the same device and dtype: only then does one kernel write them all."""
    found: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for n, tensor in enumerate(tensors):
        found[tensor.device, tensor.dtype].append(n)
    yield from found.values()
