"""Where the new units of a grown volume lie: their rows in the layers that write them, their columns in those that read them.

A unit may consist of several entries: a head has one per feature, and each has a row in the values' weight and columns in the
output's. With tables (run, unit, offset) of positions, W runs of length L in the writer, and W·m runs of length L·n in a
reader (query heads that share a value head), the entry (w, l) of a unit is read at the runs r with ⌊r / m⌋ = w, and at the
offsets o with o mod L = l.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outgrow.analysis.labels import Labels
from outgrow.analysis.slot_positions import slot_ids, unit_runs
from outgrow.analysis.volumes import Anatomy, Slot, Volume
from outgrow.growth_plan.plan import Insertion, Plan


@dataclass(frozen=True, eq=False)
class Entries:
    """Positions along an axis of a tensor: (row, how many positions it has)."""

    tensor: str
    axis: int
    positions: Labels

    def read(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The values: (row, all entries of its positions)."""
        tensor = tensors[self.tensor].detach()
        mine = tensor.index_select(self.axis, self._index(tensor)).movedim(self.axis, 0)
        plain = mine if mine.dtype == torch.float64 else mine.float()
        return plain.reshape(len(self.positions), -1)

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor], values: Tensor | float) -> None:
        tensor = tensors[self.tensor]
        index = self._index(tensor)
        shape = (len(index), *(size for axis, size in enumerate(tensor.shape) if axis != self.axis))
        if not isinstance(values, Tensor):
            values = torch.full((), values).expand(shape)
        tensor.index_copy_(self.axis, index, values.reshape(shape).movedim(0, self.axis).to(tensor))

    def _index(self, tensor: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.positions.reshape(-1), dtype=np.int64)).to(tensor.device)


@dataclass(frozen=True, eq=False)
class Runs:
    """The positions of units in one slot: tables (run, unit, offset)."""

    slot: Slot
    tables: tuple[Labels, ...]

    @property
    def single(self) -> list[Runs]:
        """Each run alone."""
        return [Runs(self.slot, (table[number : number + 1],)) for table in self.tables for number in range(len(table))]

    def rows(self, units: Sequence[int]) -> Entries:
        """One row per unit, run and offset."""
        (table,) = self.tables
        return Entries(self.slot.tensor, self.slot.axis, table[:, list(units)].transpose(1, 0, 2).reshape(-1, 1))

    def whole(self, units: Sequence[int]) -> Entries:
        """One row per unit, with all of its positions."""
        parts = [table[:, list(units)].transpose(1, 0, 2).reshape(len(units), -1) for table in self.tables]
        return Entries(self.slot.tensor, self.slot.axis, np.concatenate(parts, axis=1))

    def split(self, units: Sequence[int], runs: int, length: int) -> Entries | None:
        """Columns of each entry of a writer with so many runs of such a length; None if positions do not match its entries."""
        if len(self.tables) != 1 or len(self.tables[0]) % runs or self.tables[0].shape[2] % length:
            return None
        table = self.tables[0][:, list(units)]  # (run, unit, offset)
        shape = (runs, table.shape[0] // runs, len(units), table.shape[2] // length, length)
        apart = table.reshape(shape).transpose(2, 0, 4, 1, 3)  # (unit, run of the writer, its offset, …)
        return Entries(self.slot.tensor, self.slot.axis, apart.reshape(len(units) * runs * length, -1))


def runs_of(anatomy: Anatomy, volume: Volume, slot: Slot) -> Runs:
    return Runs(slot, tuple(unit_runs(slot_ids(anatomy, volume, slot), volume.count)))


def new_units(anatomy: Anatomy, volume: Volume, plan: Plan) -> list[int]:
    """Numbers of the units of a grown volume that the plan added."""
    added: dict[tuple[str, int], set[int]] = {}
    for edit in plan.edits:
        if isinstance(edit, Insertion):
            added.setdefault((edit.tensor, edit.axis), set()).update(edit.at)
    for slot in volume.slots:
        if (slot.tensor, slot.axis) in added:
            ids = slot_ids(anatomy, volume, slot)
            return sorted({int(ids[at]) for at in added[slot.tensor, slot.axis] if ids[at] >= 0})
    return []


def read_all(entries: Iterable[Entries], tensors: Mapping[str, Tensor]) -> Tensor:
    """The values of several entries with the same rows, side by side."""
    return torch.cat([one.read(tensors).cpu() for one in entries], dim=1)


def write_all(entries: Sequence[Entries], tensors: Mapping[str, Tensor], values: Tensor) -> None:
    """Write values that are side by side."""
    sizes = [one.positions.shape[1] * tensors[one.tensor].numel() // tensors[one.tensor].shape[one.axis] for one in entries]
    for one, part in zip(entries, values.split(sizes, dim=1), strict=True):
        one.write(tensors, part)
