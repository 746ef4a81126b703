"""Volumes: the units that must keep one size together, and every slot they occupy.

Units whose slots are alike (the same axes of the same tensors, equally often) form a volume. A new unit's positions go, at each
slot, behind the last unit of every run: so concatenations, flattened axes, fused qkv and grouped layouts stay right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outgrow.clusters import Cluster, find_clusters
from outgrow.effects import Move
from outgrow.labels import Labels, Origin
from outgrow.reading import Reading, refs_in
from outgrow.roles import READS, SCALES, SHIFTS, WRITES, find_roles

TAKES_APART = {"aten.slice", "aten.split", "aten.split_with_sizes", "aten.unsafe_split", "aten.select", "aten.unbind"}


@dataclass(frozen=True)
class Slot:
    """A place in a parameter or buffer that belongs to a volume."""

    tensor: str
    axis: int
    role: str  # "writes", "scales" or "reads"
    positions: tuple[int, ...] = field(repr=False)
    shift: bool = field(default=False, repr=False)  # a scale that is added: batch norm's bias and mean
    vector: bool = field(default=False, repr=False)  # one number a unit


@dataclass(eq=False)
class Volume:
    """Units that keep one size together.

    `methods` and `reason` are filled in by `paths`: which methods are exact here, and why others are not.
    """

    name: str
    size: int
    slots: tuple[Slot, ...]
    classes: Labels = field(repr=False)
    units: Labels = field(repr=False)  # unit number of each class
    family: int = field(repr=False)
    pinned: str = ""
    methods: tuple[str, ...] = ()
    reason: str = ""

    @property
    def growable(self) -> bool:
        return bool(self.methods)

    @cached_property
    def writers(self) -> tuple[str, ...]:
        """Paths of the modules that write it, those with weight matrices first."""
        return modules_of(slot for slot in self.slots if slot.role == WRITES)

    @cached_property
    def readers(self) -> tuple[str, ...]:
        return modules_of(slot for slot in self.slots if slot.role == READS)


def modules_of(slots: Iterable[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.tensor.rpartition(".")[0] for slot in slots))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model read once: its trace, labels resolved to classes, and all volumes."""

    reading: Reading
    root: Labels
    volumes: tuple[Volume, ...]
    verdicts: dict[tuple[str, str], Any] = field(default_factory=dict)  # what `paths` has found so far

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
            for ref in refs_in((op.args, op.kwargs)):
                result[ref.value].append(op.index)
        return result

    @cached_property
    def origin(self) -> dict[tuple[str, int], Origin]:
        return {(origin.tensor, origin.axis): origin for origin in self.reading.ties.origins}

    @cached_property
    def _births(self) -> tuple[Labels, Labels]:
        origins = self.reading.ties.origins
        starts = np.array([origin.start for origin in origins], dtype=np.int64)
        return starts, starts + np.array([origin.size for origin in origins], dtype=np.int64)

    def born(self, labels: Labels) -> list[tuple[str, int]]:
        """(tensor, axis) of the parameters on which labels were born; none for labels made along the way."""
        starts, ends = self._births
        found = np.searchsorted(starts, labels, side="right") - 1
        return [
            (self.reading.ties.origins[i].tensor, self.reading.ties.origins[i].axis)
            for i in np.unique(found[(found >= 0) & (labels < ends[found])]).tolist()
        ]

    @cached_property
    def family_of(self) -> Labels:
        """For each class, a number shared by the volumes it may belong to; −1 for none."""
        family = np.full(len(self.root), -1, dtype=np.int64)
        for volume in self.volumes:
            family[volume.classes] = volume.family
        return family

    @cached_property
    def ops_of_family(self) -> dict[int, list[int]]:
        """Which operators touch a family, in order."""
        families: dict[int, tuple[int, ...]] = {}
        seen: dict[int, tuple[int, ...]] = {}
        for index, layout in enumerate(self.reading.layouts):
            found: tuple[int, ...] = ()
            for block in layout:
                key = id(block.labels)
                if key not in seen:
                    seen[key] = tuple(np.unique(self.family_of[self.root[block.labels]]).tolist())
                found += seen[key]
            families[index] = found
        result: dict[int, list[int]] = defaultdict(list)
        for op in self.reading.trace.ops:
            touched = {f for ref in refs_in((op.args, op.kwargs)) for f in families[ref.value]}
            touched |= {f for output in op.outputs for f in families[output]}
            for family in touched - {-1}:
                result[family].append(op.index)
        return result


def find_volumes(reading: Reading) -> Anatomy:
    """Resolve the labels of a reading and group its units into volumes."""
    root = reading.ties.classes()
    roles = find_roles(reading)
    pinned = _pinned(reading, root)
    first_use = _first_use(reading)
    volumes: list[Volume] = []
    for cluster in find_clusters(reading.ties, root):
        volumes.extend(_volumes_of(cluster, reading, root, roles, pinned, len(volumes)))
    volumes.sort(key=lambda volume: (min(first_use[slot.tensor] for slot in volume.slots), _cycles(volume, reading, root)))
    return Anatomy(reading, root, tuple(_named(volumes, first_use)))


def _cycles(volume: Volume, reading: Reading, root: Labels) -> float:
    """Runs of units for each position that the volume holds: heads have fewer than the features of a head."""
    last = set(volume.classes[volume.units == volume.size - 1].tolist())
    count = 0
    for slot in volume.slots:
        origin = next(o for o in reading.ties.origins if o.tensor == slot.tensor and o.axis == slot.axis)
        mine = np.isin(root[origin.start : origin.start + origin.size], list(last))
        count += int(np.count_nonzero(np.diff(mine.astype(np.int8), prepend=0) == 1))
    return count / sum(len(slot.positions) for slot in volume.slots)


def _pinned(reading: Reading, root: Labels) -> dict[int, str]:
    result: dict[int, str] = {}
    for labels, reason, module in reading.ties.fixed:
        place = f" ({module})" if module else ""
        for item in np.unique(root[labels]).tolist():
            result.setdefault(item, reason + place)
    used = _used(reading, root)
    for origin in reading.ties.origins:
        for item in root[origin.start : origin.start + origin.size].tolist():
            if not used[item]:
                result.setdefault(item, "the model computes nothing with it")
    return result


def _used(reading: Reading, root: Labels) -> NDArray[np.bool_]:
    """Which classes reach an operator that computes something: rows that are only ever sliced away never do."""
    used = np.zeros(len(root), dtype=np.bool_)
    values = {
        ref.value
        for op, effect in zip(reading.trace.ops, reading.effects, strict=True)
        if not isinstance(effect, Move)
        for ref in refs_in((op.args, op.kwargs))
    }
    for labels in {id(block.labels): block.labels for value in values for block in reading.layouts[value]}.values():
        used[root[labels]] = True
    return used


def _first_use(reading: Reading) -> dict[str, int]:
    result: dict[str, int] = {}
    for op in reading.trace.ops:
        for ref in refs_in((op.args, op.kwargs)):
            name = reading.trace.values[ref.value].name
            if name:
                result.setdefault(name, op.index)
    unused = (value.name for value in reading.trace.values if value.name and value.name not in result)
    return result | dict.fromkeys(unused, len(reading.trace.ops))


def _volumes_of(
    cluster: Cluster,
    reading: Reading,
    root: Labels,
    roles: dict[tuple[str, int], set[str]],
    pinned: dict[int, str],
    start: int,
) -> list[Volume]:
    origins = reading.ties.origins
    if not len(cluster.classes) or not origins:
        return []
    units_of = np.full(len(root), -1, dtype=np.int64)  # by class
    units_of[cluster.classes] = cluster.units
    by_position = [units_of[root[np.arange(o.start, o.start + o.size)]] for o in origins]
    signature: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, ids in enumerate(by_position):
        found, counts = np.unique(ids[ids >= 0], return_counts=True)
        for unit, count in zip(found.tolist(), counts.tolist(), strict=True):
            signature[unit].append((index, count))
    marks: dict[int, list[int]] = defaultdict(list)
    for op in reading.trace.ops:
        if op.name in TAKES_APART:
            for output in op.outputs:
                for block in reading.layouts[output]:
                    for unit in np.unique(units_of[root[block.labels]]).tolist():
                        marks[unit].append(output)
    reasons: dict[int, str] = {}
    for item, reason in pinned.items():
        if units_of[item] >= 0:
            reasons.setdefault(int(units_of[item]), reason)
    alike: dict[object, list[int]] = defaultdict(list)
    for unit in sorted(signature):
        alike[tuple(signature[unit]), tuple(marks[unit]), reasons.get(unit)].append(unit)
    result: list[Volume] = []
    shapes = {value.name: value.shape for value in reading.trace.values if value.name}
    for members in alike.values():
        if len(members) < 2:
            continue
        numbers = {unit: number for number, unit in enumerate(_in_order(members, signature, by_position))}
        keep = np.isin(cluster.units, members)
        classes = cluster.classes[keep]
        units = np.array([numbers[unit] for unit in cluster.units[keep].tolist()], dtype=np.int64)
        slots = []
        for index, _ in signature[members[0]]:
            origin = origins[index]
            positions = tuple(np.flatnonzero(np.isin(by_position[index], members)).tolist())
            vector = sum(size > 1 for size in shapes[origin.tensor]) == 1
            for role in sorted(roles.get((origin.tensor, origin.axis), {WRITES})):
                public = SCALES if role == SHIFTS else role
                slots.append(Slot(origin.tensor, origin.axis, public, positions, role == SHIFTS, vector))
        family = cluster.family if cluster.family else -(start + len(result)) - 2
        result.append(Volume("", len(members), tuple(slots), classes, units, family, reasons.get(members[0], "")))
    return result


def _in_order(members: list[int], signature: dict[int, list[tuple[int, int]]], by_position: list[Labels]) -> list[int]:
    """Units in the order in which they stand at their first slot."""
    ids = by_position[signature[members[0]][0][0]]
    chosen = set(members)
    return [unit for unit in dict.fromkeys(ids.tolist()) if unit in chosen]


def _named(volumes: list[Volume], first_use: dict[str, int]) -> list[Volume]:
    """A volume is called after the first module that writes it; further ones of that name are numbered."""
    taken: dict[str, int] = defaultdict(int)
    for volume in sorted(volumes, key=lambda volume: bool(volume.pinned)):
        slot = min(volume.slots, key=lambda slot: (slot.role != WRITES, slot.role != SCALES, first_use[slot.tensor]))
        base = slot.tensor.rpartition(".")[0] or slot.tensor
        taken[base] += 1
        volume.name = base if taken[base] == 1 else f"{base}#{taken[base]}"
    return volumes
