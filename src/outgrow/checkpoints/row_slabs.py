"""Compute a large tensor in slabs of rows, so that its memory does not depend on its size.

If no edit acts along axis 0, rows do not depend on each other, except through two things that are settled beforehand: the
standard deviation of all old values, which scales draws, and the sequence of draws, which goes on from slab to slab. So the
values are those of the whole tensor computed at once. Embeddings and output layers, the largest tensors of a language model,
are of this kind when its width grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from outgrow.apply.fills import Generators
from outgrow.apply.grow_tensor import fill_values, grown, needs_deviation
from outgrow.checkpoints.new_values import Edited, Stored
from outgrow.growth_plan.plan import Insertion, Rescaling

FILLS = ("free", "zero", "one", "mean", "copy")  # "rowmean" and "spread" use all entries of a row of any rank
ReadRows = Callable[[int, int], Tensor]  # rows of the stored tensor: the first one, how many


class Continued(Generators):
    """Random generators that go on with their sequence: each seed is set at its first use only."""

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[tuple[torch.device, int], torch.Generator] = {}

    def seeded(self, device: torch.device, seed: int) -> torch.Generator:
        key = device, seed
        if key not in self._begun:
            self._begun[key] = torch.Generator(device=device).manual_seed(seed)
        return self._begun[key]


def in_slabs(value: object) -> Edited | None:
    """The value, if it can be computed in slabs: one plan's edits of a stored matrix, none of them along its rows."""
    if not isinstance(value, Edited) or not isinstance(value.source, Stored):
        return None
    for edit in value.edits:
        if isinstance(edit, Insertion):
            callable_init = callable(value.inits.get(edit.init.partition("*")[0]))
            if edit.axis == 0 or edit.noise or edit.fill not in FILLS or callable_init or not _is_drawn_by_rows(edit):
                return None
        elif not isinstance(edit, Rescaling):
            return None
    return value


def _is_drawn_by_rows(edit: Insertion) -> bool:
    """Whether the values that a fill draws do not depend on the number of rows, as those for a fan would."""
    return edit.fill != "free" or edit.init.partition("*")[0] == "std"


@torch.no_grad()
def slabs(value: Edited, read: ReadRows, rows: int, step: int, others: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The grown rows, slab by slab: the first row of each, and its values. others: values that weight a mean."""
    deviation = _deviation(read, rows, step) if needs_deviation(value.edits) else 0.0
    generators = Continued()
    for first in range(0, rows, step):
        old = read(first, min(step, rows - first))
        new = grown(old, value.edits)
        fill_values(new, old, value.edits, others, value.seed, value.inits, deviation, generators=generators)
        yield first, new


def _deviation(read: ReadRows, rows: int, step: int) -> float:
    """The standard deviation of all values, with sums in float64."""
    count, total, square = 0, 0.0, 0.0
    for first in range(0, rows, step):
        values = read(first, min(step, rows - first)).double()
        count += values.numel()
        total += float(values.sum())
        square += float(values.square_().sum())
    mean = total / count
    return math.sqrt(max(square / count - mean**2, 0.0))
