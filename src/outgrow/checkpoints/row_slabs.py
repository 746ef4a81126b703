"""Compute a large tensor in slabs of rows, so that its memory does not depend on its size and slabs stay in the cache.

Any rows of a new tensor can be computed from some rows of the stored one. An expression becomes a chain of *stages*, one per
edit or write; each computes the rows at given positions (along axis 0) from rows of the stage before it:

    an insertion along another axis    fills the new columns of these rows
    an insertion along axis 0          draws, copies or sets the rows that are new, and passes the others through
    a rescaling                        multiplies the rows

Draws can be read from any row on, and the standard deviation that scales them is taken beforehand, in one pass over all rows of
the stage before the edits. So the values are those of the whole tensor computed at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outgrow.apply.deviations import MILLION, deviation_of_parts, deviations
from outgrow.apply.draws import Draws
from outgrow.apply.fills import Filling, Generators, bound_of, fill, put_draws, seed_of
from outgrow.apply.final_positions import FinalPlace, Positions, TensorEdits
from outgrow.apply.grow_tensor import grown
from outgrow.apply.tensor_entries import along, multiply
from outgrow.checkpoints.new_values import Copied, Edited, Stored, Value
from outgrow.exactness.zero_output import write_into
from outgrow.growth_plan.module_starts import Fill, Repeats, Write, Zeros
from outgrow.growth_plan.plan import Edit, Insertion, Rescaling

COLUMN_FILLS = ("free", "zero", "one", "mean", "rowmean", "copy")
ROW_FILLS = ("free", "zero", "one", "copy")
CLOSE = 2  # rows that are read for each row that is needed
ELSEWHERE = -1  # in place of a stored row: the new row is not a copy of it
Shape = tuple[int, ...]
CONSTANTS = {"zero": 0.0, "one": 1.0}
ReadRows = Callable[[int, int], Tensor]  # rows of the stored tensor: the first one, how many


class Stage(ABC):
    """A tensor of which any rows can be computed. shape: of the whole tensor."""

    shape: Shape

    @abstractmethod
    def rows(self, at: Positions) -> Tensor:
        """The rows at some positions, in memory that may be changed."""

    def stored(self, at: Positions) -> Positions:
        """For each row, the stored row that it equals; ELSEWHERE for the others."""
        return np.full(len(at), ELSEWHERE)


@dataclass(frozen=True, eq=False)
class Leaf:
    """The stored tensor of an expression, in the dtype of the computation.

    whole: returns the values of a small expression, of a vector that weights a mean. step: values in a slab.
    """

    read: ReadRows
    shape: Shape
    dtype: torch.dtype
    whole: Callable[[Value], Tensor]
    step: int


def in_slabs(value: Value, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether a value can be computed in slabs. shape: of the stored tensor; dtype: of the computation."""
    if isinstance(value, Stored):
        return len(shape) > 1
    if not in_slabs(value.source, shape, dtype):
        return False
    return isinstance(value, Copied) or all(_is_row_by_row(edit, value, dtype) for edit in value.edits)


def _is_row_by_row(edit: Edit, value: Edited, dtype: torch.dtype) -> bool:
    if not isinstance(edit, Insertion):
        return isinstance(edit, Rescaling)
    if (
        edit.noise
        or edit.fade
        or callable(value.inits.get(edit.init))
        or edit.fill not in (COLUMN_FILLS if edit.axis else ROW_FILLS)
    ):
        return False
    return edit.fill != "free" or dtype == torch.float32


def stage_of(value: Value, leaf: Leaf) -> Stage:
    """The last stage of an expression for which `in_slabs` holds."""
    if isinstance(value, Stored):
        return StoredRows(leaf.read, leaf.shape)
    stage = stage_of(value.source, leaf)
    if isinstance(value, Copied):
        for write in value.writes:
            stage = WrittenColumns(stage, write) if isinstance(write, Fill) or write.axis else WrittenRows(stage, write)
        return stage
    old, edits = stage, TensorEdits(value.edits)  # a copy, so that its positions are released with the stages
    deviation = cache(lambda: _deviation(old, leaf.step))
    others = {name: leaf.whole(other) for name, other in value.others.items()}
    stage = Moved(old, edits)
    for edit, place in zip(edits, edits.places, strict=True):
        if isinstance(edit, Rescaling):
            stage = Rescaled(stage, edit)
        elif isinstance(edit, Insertion):
            kind = InsertedColumns if edit.axis else InsertedRows
            stage = kind(stage, edit, place, value, others, deviation, leaf.dtype)
    return stage


def slabs(stage: Stage, first: int, count: int, step: int) -> Iterator[tuple[int, Tensor]]:
    """Neighbouring rows, slab by slab: the first row of each, and its values. step: values in a slab."""
    rows = max(1, step // max(math.prod(stage.shape[1:]), 1))
    for start in range(first, first + count, rows):
        yield start, stage.rows(np.arange(start, min(start + rows, first + count)))


def _deviation(stage: Stage, step: int) -> float:
    def parts() -> Iterator[Tensor]:
        return (rows.reshape(-1) for _, rows in slabs(stage, 0, stage.shape[0], step))

    return deviation_of_parts(parts) if math.prod(stage.shape) >= MILLION else deviations([torch.cat(list(parts()))])[0]


class StoredRows(Stage):
    """The stored tensor."""

    def __init__(self, read: ReadRows, shape: Shape) -> None:
        self._read, self.shape = read, shape

    def rows(self, at: Positions) -> Tensor:
        return gathered(self._read, at)

    def stored(self, at: Positions) -> Positions:
        return at


class WrittenColumns(Stage):
    """A write along another axis than 0, or into all entries."""

    def __init__(self, source: Stage, write: Write) -> None:
        self._source, self._write, self.shape = source, write, source.shape

    def rows(self, at: Positions) -> Tensor:
        found = self._source.rows(at)
        write_into(found, self._write)
        return found


class WrittenRows(Stage):
    """A write along axis 0: some rows are zero, or copies of others times a sign."""

    def __init__(self, source: Stage, write: Zeros | Repeats) -> None:
        self._source, self.shape = source, source.shape
        self._from, self._factor = np.arange(source.shape[0]), np.ones(source.shape[0])
        if isinstance(write, Repeats):
            self._from[list(write.to)] = list(write.source)
            self._factor[list(write.to)] = write.sign
        else:
            self._factor[list(write.at)] = 0.0

    def rows(self, at: Positions) -> Tensor:
        found = multiplied(self._source.rows(self._from[at]), self._factor[at])
        zero = self._factor[at] == 0.0
        if zero.any():  # also where the old values are not finite
            found[torch.from_numpy(zero)] = 0.0
        return found

    def stored(self, at: Positions) -> Positions:
        return np.where(self._factor[at] == 1.0, self._source.stored(self._from[at]), ELSEWHERE)


class Moved(Stage):
    """The values before a plan's edits, at their positions after all of them. Rows that are new do not exist yet."""

    def __init__(self, source: Stage, edits: TensorEdits) -> None:
        self._source, self._rows = source, edits.where.get(0)
        self._columns = TensorEdits(edit for edit in edits if isinstance(edit, Insertion) and edit.axis > 0)
        self.shape = edits.shape_from(source.shape)

    def rows(self, at: Positions) -> Tensor:
        old = self._source.rows(self._before(at))
        return grown(old, self._columns) if self._columns else old

    def stored(self, at: Positions) -> Positions:
        return super().stored(at) if self._columns else self._source.stored(self._before(at))

    def _before(self, at: Positions) -> Positions:
        return at if self._rows is None else np.searchsorted(self._rows, at)


class Rescaled(Stage):
    """A rescaling of all entries."""

    def __init__(self, source: Stage, edit: Rescaling) -> None:
        self._source, self._edit, self.shape = source, edit, source.shape

    def rows(self, at: Positions) -> Tensor:
        found = self._source.rows(at).mul_(self._edit.factor)
        return found.add_(self._edit.offset * (self._edit.factor - 1)) if self._edit.offset else found


class Inserted(Stage):
    """An insertion.

    source: the stage before it. others: vectors that weight a mean. deviation: of the values before all edits of the plan.
    """

    def __init__(
        self,
        source: Stage,
        edit: Insertion,
        place: FinalPlace,
        value: Edited,
        others: Mapping[str, Tensor],
        deviation: Callable[[], float],
        dtype: torch.dtype,
    ) -> None:
        self.source, self.edit, self.place, self.value, self.others = source, edit, place, value, others
        self.deviation, self.dtype, self.shape = deviation, dtype, source.shape

    @cached_property
    def draws(self) -> Draws:
        name, _, factor = self.edit.init.partition("*")
        count = self.place.drawing.count
        shape = tuple(count if axis == self.edit.axis else size for axis, size in enumerate(self.shape))
        bound, seed = bound_of(name, self.shape, self.deviation()), seed_of(self.edit, self.value.seed)
        again = self.edit.axis == 0 and count < len(self.place.at)
        return Draws(shape, self.dtype, bound, seed, float(factor or 1.0), again)

    def drawn(self, at: Positions) -> Tensor:
        return gathered(self.draws.rows, at)


class InsertedColumns(Inserted):
    """An insertion along another axis than 0: each row gets new entries."""

    def rows(self, at: Positions) -> Tensor:
        found, edit, place = self.source.rows(at), self.edit, self.place
        if edit.fill == "free":
            if edit.keep:
                multiply(found, edit.axis, place.members, edit.keep)
            put_draws(found, self.drawn(at), edit, place)
        else:
            fill(Filling(found, found, edit, place, self.others, 0, {}, 0.0, found.device, Generators()))
        return found


class InsertedRows(Inserted):
    """An insertion along axis 0: some rows are new."""

    def rows(self, at: Positions) -> Tensor:
        number, new = self._numbers(at)
        if not new.any():
            return self._existing(at)
        if new.all():
            return self._filled(number)
        result = torch.empty((len(at), *self.shape[1:]), dtype=self.dtype)
        result[torch.from_numpy(~new)] = self._existing(at[~new])
        result[torch.from_numpy(new)] = self._filled(number[new])
        return result

    def stored(self, at: Positions) -> Positions:
        number, new = self._numbers(at)
        result = super().stored(at)
        if not self.edit.keep:
            result[~new] = self.source.stored(at[~new])
            if self.edit.fill == "copy":
                plain = self._signs[number[new]] == 1.0
                result[new] = np.where(plain, self.source.stored(self.place.sources[number[new]]), ELSEWHERE)
        return result

    def _numbers(self, at: Positions) -> tuple[Positions, NDArray[np.bool_]]:
        """For each row, its number among the new rows, and whether it is new."""
        number = np.minimum(np.searchsorted(self.place.at, at), len(self.place.at) - 1)
        return number, self.place.at[number] == at

    @cached_property
    def _signs(self) -> NDArray[np.float64]:
        return np.array(self.edit.signs, dtype=np.float64)

    @cached_property
    def _keep(self) -> NDArray[np.float64]:
        """The factor of each existing row."""
        found = np.ones(self.shape[0])
        if self.edit.keep:
            found[self.place.members] = self.edit.keep
        return found

    def _existing(self, at: Positions) -> Tensor:
        return multiplied(self.source.rows(at), self._keep[at])

    def _filled(self, number: Positions) -> Tensor:
        """The values of new rows, by their numbers."""
        if self.edit.fill in CONSTANTS:
            return torch.full((len(number), *self.shape[1:]), CONSTANTS[self.edit.fill], dtype=self.dtype)
        signs = self._signs[number]
        if self.edit.fill == "free":
            return multiplied(self.drawn(self.place.drawing.draws[number]), signs)
        sources = self.place.sources[number]
        return multiplied(self._existing(sources), signs / self._keep[sources])


def neighbours(at: Positions) -> list[tuple[int, int]]:
    """Runs of positions that follow each other, in any order of runs: the first one, how many.

    Example:
        >>> neighbours(np.array([5, 6, 7, 2, 3]))
        [(5, 3), (2, 2)]
    """
    bounds = [0, *(np.flatnonzero(np.diff(at) != 1) + 1).tolist(), len(at)]
    return [(int(at[start]), end - start) for start, end in pairwise(bounds) if start < end]


def gathered(read: ReadRows, at: Positions) -> Tensor:
    """Rows at any positions. Many rows that lie close together are read with those between them."""
    runs = neighbours(at)
    if len(runs) == 1:
        return read(*runs[0])
    first, span = int(at.min()), int(at.max() - at.min()) + 1
    if span <= CLOSE * len(at):
        return read(first, span).index_select(0, torch.from_numpy(at - first))
    return torch.cat([read(start, count) for start, count in runs])


def multiplied(rows: Tensor, factors: NDArray[np.float64]) -> Tensor:
    """Each row times its factor, in place."""
    if (factors == 1.0).all():
        return rows
    return rows.mul_(torch.from_numpy(factors).to(rows.dtype).view(along(0, rows.ndim)))
