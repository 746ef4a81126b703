"""Volumes: the units that must keep one size together, and every slot they occupy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.effects import operands_of
from outgrow.analysis.interpret_trace import Reading
from outgrow.analysis.labels import Labels, Origin
from outgrow.analysis.repeated_blocks import BlockKinds
from outgrow.analysis.roles import READS, SCALES, SHIFTS, WRITES
from outgrow.text.plurals import counted
from outgrow.trace.operators import Op


@dataclass(frozen=True)
class Slot:
    """A place in a parameter or buffer that belongs to a volume: `tensor` by name, and the axis along which the units lie.

    role: "writes" (rows and biases that produce units), "scales" (one value per unit, as in batch norm), or "reads" (columns
    that consume them).
    """

    tensor: str
    axis: int
    role: str  # "writes", "scales" or "reads"
    positions: tuple[int, ...] = field(repr=False)
    shift: bool = field(default=False, repr=False)  # an additive scale: batch norm's bias and mean
    vector: bool = field(default=False, repr=False)  # one value per unit


@dataclass(frozen=True, eq=False)
class AxisLabels:
    """The labels of all parameter axes, which come first: the axis that each belongs to, and the roles of that axis."""

    origins: list[Origin]
    owner: NDArray[np.int32]  # for each label, the number of its origin
    roles: dict[tuple[str, int], set[str]]
    vectors: set[str]  # tensors with one value per unit
    _shared: dict[bytes, tuple[int, ...]] = field(default_factory=dict, kw_only=True)  # positions that equal layers have

    def slots(self, labels: Labels) -> tuple[Slot, ...]:
        """The slots of ascending labels, one or more per parameter axis."""
        owners = self.owner[labels]
        bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1))
        result: list[Slot] = []
        for number, (start, end) in zip(owners[bounds[:-1]].tolist(), pairwise(bounds.tolist()), strict=True):
            origin = self.origins[number]
            positions = self._positions(labels[start:end] - origin.start)
            for role in sorted(self.roles.get((origin.tensor, origin.axis), {WRITES})):
                plain = SCALES if role == SHIFTS else role
                result.append(Slot(origin.tensor, origin.axis, plain, positions, role == SHIFTS, origin.tensor in self.vectors))
        return tuple(result)

    def _positions(self, positions: Labels) -> tuple[int, ...]:
        """Positions as a tuple, one per content: many layers have the same, and integers take much memory."""
        key = positions.astype(np.int64, copy=False).tobytes()  # of one type, so that equal bytes mean equal positions
        if key not in self._shared:
            self._shared[key] = tuple(positions.tolist())
        return self._shared[key]


@dataclass(eq=False)
class Volume:
    """Units that keep one size together.

    `methods` and `reason` follow from `exactness/propagate_states.py`: the methods that are exact here, and why others are not.
    """

    name: str
    count: int  # how many units it has
    labels: Labels = field(repr=False)  # its labels on axes of parameters and buffers
    births: AxisLabels = field(repr=False)
    classes: Labels = field(repr=False)
    units: Labels = field(repr=False)  # unit number of each class
    family: int = field(repr=False)
    pinned: str = ""
    methods: tuple[str, ...] = ()
    reason: str = ""
    grain: int = 1  # what one unit adds to the size: channels of a group, query heads or features of a unit of heads, else 1
    kind: str | None = None  # what its units are for (see `analysis/volume_kinds.py`)
    extendable: bool = False  # pinned only as the model's interface: kinds "vocab" and "outputs" may append entries
    obstacle: str = ""  # why nothing can be appended, where that is another reason than the first
    rotary: bool = False  # pinned only by the frequencies of a rotary encoding: kind "head_dim" may grow by whole factors
    unit: str = ""  # what one unit is, where that is more than a head or a feature: "2 query heads with the key …"
    form: str = ""  # of heads that share keys and values: "group" (whole groups) or "query" (query heads of each group)

    @property
    def size(self) -> int:
        """Its size in channels, features or heads."""
        return self.count * self.grain

    def __repr__(self) -> str:
        can = f"grows by {', '.join(self.methods)}" if self.methods else self.reason or self.pinned or "not judged yet"
        kind = f", kind={self.kind!r}" if self.kind else ""
        kind += f" (one unit: {self.unit})" if self.unit else ""
        return f"Volume({self.name!r}, size={self.size}{kind}, {counted(len(self.slots), 'slot')}, {can})"

    @property
    def growable(self) -> bool:
        return bool(self.methods)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Every place in a parameter or buffer that belongs to the volume."""
        return self.births.slots(self.labels)

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """Paths of the modules that write the volume, those with weight matrices first."""
        return modules_of(slot for slot in self.slots if slot.role == WRITES)

    @cached_property
    def readers(self) -> tuple[str, ...]:
        return modules_of(slot for slot in self.slots if slot.role == READS)


def modules_of(slots: Iterable[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.tensor.rpartition(".")[0] for slot in slots))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The analysis of a model: its interpreted trace, labels resolved to classes, and all volumes."""

    reading: Reading
    root: Labels
    volumes: tuple[Volume, ...]
    verdicts: dict[tuple[str, str], Any] = field(default_factory=dict)  # results of `exactness/propagate_states.py` so far
    _lookups: dict[str, Any] = field(default_factory=dict, repr=False)

    def unit_lookup(self, volume: Volume) -> UnitLookup:
        """Lookups for a volume; those of the last volume are cached."""
        if self._lookups.get("name") != volume.name:
            self._lookups.update(name=volume.name, unit_lookup=UnitLookup(self, volume))
        unit_lookup: UnitLookup = self._lookups["unit_lookup"]
        return unit_lookup

    def units(self, volume: Volume, labels: Labels) -> Labels:
        """Unit numbers of an array of labels; −1 where the volume has none."""
        classes = self.root[labels]
        found = np.minimum(np.searchsorted(volume.classes, classes), len(volume.classes) - 1)
        return np.where(volume.classes[found] == classes, volume.units[found], -1)

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """For each value, the operators that take it."""
        result: dict[int, list[int]] = defaultdict(list)
        for op in self.reading.trace.ops:
            for ref in op.refs:
                result[ref.value].append(op.index)
        return result

    @cached_property
    def maker(self) -> dict[int, Op]:
        """For each value, the operator that makes it."""
        return {output: op for op in self.reading.trace.ops for output in op.outputs}

    @cached_property
    def held(self) -> dict[str, int]:
        """For each parameter and buffer, its value in the trace."""
        return {value.name: value.index for value in self.reading.trace.values if value.name}

    @cached_property
    def buffers(self) -> set[str]:
        return {value.name for value in self.reading.trace.values if value.kind == "buffer"}

    @cached_property
    def origin(self) -> dict[tuple[str, int], Origin]:
        return {(origin.tensor, origin.axis): origin for origin in self.reading.ties.origins}

    @cached_property
    def _births(self) -> tuple[Labels, Labels]:
        origins = self.reading.ties.origins
        starts = np.array([origin.start for origin in origins], dtype=np.int64)
        return starts, starts + np.array([origin.size for origin in origins], dtype=np.int64)

    def born(self, labels: Labels) -> list[tuple[str, int]]:
        """(tensor, axis) of the parameters that labels come from; nothing for labels created by operators."""
        starts, ends = self._births
        found = np.searchsorted(starts, labels, side="right") - 1
        return [
            (self.reading.ties.origins[i].tensor, self.reading.ties.origins[i].axis)
            for i in np.unique(found[(found >= 0) & (labels < ends[found])]).tolist()
        ]

    @cached_property
    def family_of(self) -> NDArray[np.int32]:
        """For each class, the family of the volumes that it may belong to; −1 for none."""
        family = np.full(len(self.root), -1, dtype=np.int32)
        for volume in self.volumes:
            family[volume.classes] = volume.family
        return family

    @cached_property
    def kinds(self) -> BlockKinds:
        return BlockKinds(self)

    @cached_property
    def volumes_by_label(self) -> VolumesByLabel:
        return VolumesByLabel(self)

    @cached_property
    def ops_of(self) -> dict[str, list[int]]:
        """For each volume, by name, the operators that touch any of its units, in order."""
        reading = self.reading
        result: dict[str, list[int]] = {volume.name: [] for volume in self.volumes}
        for op, effect in zip(reading.trace.ops, reading.effects, strict=True):
            values = (*(ref.value for ref in op.refs), *op.outputs)
            layouts = [*(reading.layouts[value] for value in values), *(side.layout for side in operands_of(effect))]
            for number in {
                number for layout in layouts for block in layout for number in self.volumes_by_label.of(block.labels)
            }:
                result[self.volumes[number].name].append(op.index)
        return result


class UnitLookup:
    """Where the units of one volume lie in arrays of labels. Arrays are kept alive, so that their ids stay unique."""

    def __init__(self, anatomy: Anatomy, volume: Volume) -> None:
        self.anatomy, self.volume = anatomy, volume
        self._ids: dict[int, tuple[Labels, Labels]] = {}
        self._along: dict[int, list[int]] = {}
        self._born: dict[int, list[tuple[str, int]]] = {}

    def ids(self, labels: Labels) -> Labels:
        """Unit numbers of an array of labels; −1 where the volume has none."""
        key = id(labels)
        if key not in self._ids:
            self._ids[key] = labels, self.anatomy.units(self.volume, labels)
        return self._ids[key][1]

    def along(self, labels: Labels) -> list[int]:
        """Axes of the array along which units lie."""
        key = id(labels)
        if key not in self._along:
            ids = self.ids(labels)
            here = bool((ids >= 0).any())
            self._along[key] = [a for a in range(ids.ndim) if here and (ids != ids.take([0], axis=a)).any()]
        return self._along[key]

    def born(self, labels: Labels) -> list[tuple[str, int]]:
        """(tensor, axis) of the parameters that labels of the volume's units come from."""
        key = id(labels)
        if key not in self._born:
            self._born[key] = self.anatomy.born(labels[self.ids(labels) >= 0])
        return self._born[key]


class VolumesByLabel:
    """Which volumes have units among some labels; a class on a grid belongs to one volume per direction."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.root = anatomy.root
        classes = np.concatenate([np.zeros(0, dtype=np.int64), *(volume.classes for volume in anatomy.volumes)])
        owners = np.repeat(np.arange(len(anatomy.volumes)), [len(volume.classes) for volume in anatomy.volumes])
        order = np.argsort(classes, kind="stable")
        self.owners = owners[order]
        self.first = np.zeros(len(self.root) + 1, dtype=np.int32 if len(classes) < 2**31 else np.int64)
        np.cumsum(np.bincount(classes, minlength=len(self.root)), out=self.first[1:])
        self._known: dict[int, tuple[Labels, tuple[int, ...]]] = {}  # arrays are kept alive, so that their ids stay unique

    def of(self, labels: Labels) -> tuple[int, ...]:
        key = id(labels)
        if key not in self._known:
            classes = self.root[labels].ravel()
            start, end = self.first[classes], self.first[classes + 1]
            found = [self.owners[(start + more)[start + more < end]] for more in range(int((end - start).max(initial=0)))]
            self._known[key] = labels, tuple(np.unique(np.concatenate(found)).tolist()) if found else ()
        return self._known[key][1]
