"""Volumes: the units that must keep one size together, and every slot they occupy.

Units whose slots are alike (the same axes of the same tensors, equally often) form a volume. A new unit's positions go, at each
slot, behind the last unit of every run: so concatenations, flattened axes, fused qkv and grouped layouts stay right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outgrow.clusters import Cluster, find_clusters
from outgrow.effects import Contract, Move
from outgrow.labels import Labels, Origin
from outgrow.reading import Reading
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
    count: int  # how many units it has
    slots: tuple[Slot, ...]
    classes: Labels = field(repr=False)
    units: Labels = field(repr=False)  # unit number of each class
    family: int = field(repr=False)
    pinned: str = ""
    methods: tuple[str, ...] = ()
    reason: str = ""
    grain: int = 1  # how much a unit counts: a group of channels counts as many as it has, a head as one

    @property
    def size(self) -> int:
        """Its size as people count it: channels, features, heads."""
        return self.count * self.grain

    def __repr__(self) -> str:
        can = f"grows by {', '.join(self.methods)}" if self.methods else self.reason or self.pinned or "not judged yet"
        return f"Volume({self.name!r}, size={self.size}, {len(self.slots)} slots, {can})"

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
            for ref in op.refs:
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
            touched = {f for ref in op.refs for f in families[ref.value]}
            touched |= {f for output in op.outputs for f in families[output]}
            for family in touched - {-1}:
                result[family].append(op.index)
        return result


def find_volumes(reading: Reading) -> Anatomy:
    """Resolve the labels of a reading and group its units into volumes."""
    root = reading.ties.classes()
    finder = _Finder(reading, root)
    first_use = _first_use(reading)
    volumes: list[Volume] = []
    for cluster in find_clusters(reading.ties, root):
        volumes.extend(finder.volumes_of(cluster, len(volumes)))
    first = {id(volume): min(first_use[slot.tensor] for slot in volume.slots) for volume in volumes}
    rivals = Counter(first.values())
    volumes.sort(key=lambda v: (first[id(v)], finder.cycles(v) if rivals[first[id(v)]] > 1 else 0.0))
    anatomy = Anatomy(reading, root, tuple(_named(volumes, first_use)))
    headed = _headed(anatomy)
    for volume in anatomy.volumes:
        if volume.family >= 1 and volume.family not in headed:
            slot = next((slot for slot in volume.slots if slot.role == WRITES), volume.slots[0])
            volume.grain = len(slot.positions) // volume.count
    return anatomy


def _headed(anatomy: Anatomy) -> set[int]:
    """Families whose units meet in a product of activations: heads and their features, which are counted one by one.

    All other grids are groups of channels, which are counted in channels.
    """
    reading = anatomy.reading
    found: set[int] = set()
    for effect in reading.effects:
        if isinstance(effect, Contract) and not any(reading.constant[side.value] for side in (effect.left, effect.right)):
            sides = [
                {f for block in side.layout for f in np.unique(anatomy.family_of[anatomy.root[block.labels]]).tolist()}
                for side in (effect.left, effect.right)
            ]
            found |= sides[0] & sides[1]
    return found


def _pinned(reading: Reading, root: Labels) -> tuple[Labels, list[str]]:
    """Classes that can't grow, those with the foremost reason first, and the reason of each."""
    classes: list[Labels] = []
    reasons: list[str] = []
    for labels, reason, module in reading.ties.fixed:
        classes.append(np.unique(root[labels]))
        reasons += [f"{reason} ({module})" if module else reason] * len(classes[-1])
    used = _used(reading, root)
    births = root[: sum(origin.size for origin in reading.ties.origins)]
    classes.append(births[~used[births]])
    reasons += ["the model computes nothing with it"] * len(classes[-1])
    return np.concatenate(classes), reasons


def _used(reading: Reading, root: Labels) -> NDArray[np.bool_]:
    """Which classes reach an operator that computes something: rows that are only ever sliced away never do."""
    used = np.zeros(len(root), dtype=np.bool_)
    values = {
        ref.value
        for op, effect in zip(reading.trace.ops, reading.effects, strict=True)
        if not isinstance(effect, Move)
        for ref in op.refs
    }
    for labels in {id(block.labels): block.labels for value in values for block in reading.layouts[value]}.values():
        used[root[labels]] = True
    return used


def _first_use(reading: Reading) -> dict[str, int]:
    result: dict[str, int] = {}
    for op in reading.trace.ops:
        for ref in op.refs:
            name = reading.trace.values[ref.value].name
            if name:
                result.setdefault(name, op.index)
    unused = (value.name for value in reading.trace.values if value.name and value.name not in result)
    return result | dict.fromkeys(unused, len(reading.trace.ops))


class _Finder:
    """Finds volumes in clusters. Labels of parameters are the first there are: `owner` tells the origin of each."""

    def __init__(self, reading: Reading, root: Labels) -> None:
        self.root = root
        self.origins = reading.ties.origins
        self.origin = {(origin.tensor, origin.axis): origin for origin in self.origins}
        self.owner = np.repeat(np.arange(len(self.origins)), [origin.size for origin in self.origins])
        self.classes = root[: len(self.owner)]
        order = np.argsort(self.classes, kind="stable")
        self.by_class = order, self.classes[order]
        self.roles = find_roles(reading)
        self.pinned, self.reasons = _pinned(reading, root)
        self.vectors = {v.name for v in reading.trace.values if v.name and sum(size > 1 for size in v.shape) == 1}
        parts = [
            (output, np.unique(root[block.labels]))
            for op in reading.trace.ops
            if op.name in TAKES_APART
            for output in op.outputs
            for block in reading.layouts[output]
        ]
        self.part_output = np.array([output for output, _ in parts], dtype=np.int64)
        self.part_classes = np.concatenate([np.zeros(0, dtype=np.int64), *(classes for _, classes in parts)])
        self.part = np.repeat(np.arange(len(parts)), [len(classes) for _, classes in parts])

    def volumes_of(self, cluster: Cluster, start: int) -> list[Volume]:
        if not len(cluster.classes) or not self.origins:
            return []
        units_of = np.full(len(self.root), -1, dtype=np.int64)  # by class
        units_of[cluster.classes] = cluster.units
        positions = self._positions(cluster.classes)
        units = units_of[self.classes[positions]]
        groups = self._alike(units_of, units, self.owner[positions])
        volume = np.full(len(self.root), -1, dtype=np.int64)  # by unit
        number = np.zeros(len(self.root), dtype=np.int64)  # by unit: its number in its volume
        for index, (members, _) in enumerate(groups):
            volume[members] = index
        standing, owned = _sorted_into(volume[units], len(groups)), _sorted_into(volume[cluster.units], len(groups))
        result: list[Volume] = []
        for (members, reason), here, mine in zip(groups, standing, owned, strict=True):
            axes = self._axes(positions[here])
            there, first = np.unique(units[here[: len(axes[0][1])]], return_index=True)
            number[there[np.argsort(first)]] = np.arange(len(members))  # as they stand at their first slot
            slots = tuple(slot for origin, found in axes for slot in self._slots(origin, found))
            family = cluster.family if cluster.family else -(start + len(result)) - 2
            numbers = number[cluster.units[mine]]
            if cluster.torn:
                reason = reason or "the code ties its units along two axes at once"
            result.append(Volume("", len(members), slots, cluster.classes[mine], numbers, family, reason))
        return result

    def _positions(self, classes: Labels) -> Labels:
        """Labels of parameters that are of one of the classes."""
        first, end = (np.searchsorted(self.by_class[1], classes, side=side) for side in ("left", "right"))
        counts = end - first
        index = np.repeat(end - np.cumsum(counts), counts) + np.arange(counts.sum())
        here = np.zeros(len(self.owner), dtype=np.bool_)
        here[self.by_class[0][index]] = True
        return np.flatnonzero(here)

    def _alike(self, units_of: Labels, units: Labels, owner: Labels) -> list[tuple[list[int], str]]:
        """Two or more units with the same slots, taken apart and pinned in the same way; and why, if they are pinned."""
        bearers, owners, counts = _counted(units, owner)
        slots = _rows(bearers, np.column_stack([owners, counts]))
        marked, parts, _ = _counted(units_of[self.part_classes], self.part)
        marks = _rows(marked, self.part_output[parts])
        pinned = units_of[self.pinned]
        here = np.flatnonzero(pinned >= 0)
        pinned, first = np.unique(pinned[here], return_index=True)
        reasons = {unit: self.reasons[index] for unit, index in zip(pinned.tolist(), here[first].tolist(), strict=True)}
        alike: dict[tuple[bytes, bytes | None, str], list[int]] = defaultdict(list)
        for unit, row in slots.items():
            alike[row, marks.get(unit), reasons.get(unit, "")].append(unit)
        return [(members, reason) for (_, _, reason), members in alike.items() if len(members) > 1]

    def _axes(self, positions: Labels) -> list[tuple[Origin, Labels]]:
        """Positions, which ascend, by the axis on which they lie."""
        owners = self.owner[positions]
        bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)).tolist()
        return [(self.origins[owners[a]], positions[a:b]) for a, b in pairwise(bounds)]

    def _slots(self, origin: Origin, found: Labels) -> list[Slot]:
        positions = tuple((found - origin.start).tolist())
        vector = origin.tensor in self.vectors
        return [
            Slot(origin.tensor, origin.axis, SCALES if role == SHIFTS else role, positions, role == SHIFTS, vector)
            for role in sorted(self.roles.get((origin.tensor, origin.axis), {WRITES}))
        ]

    def cycles(self, volume: Volume) -> float:
        """Runs of units for each position that the volume holds: heads have fewer than the features of a head."""
        last = np.zeros(len(self.root), dtype=np.int8)
        last[volume.classes[volume.units == volume.count - 1]] = 1
        count = 0
        for slot in volume.slots:
            origin = self.origin[slot.tensor, slot.axis]
            mine = last[self.classes[origin.start : origin.start + origin.size]]
            count += int(mine[0]) + int(np.count_nonzero(mine[1:] > mine[:-1]))
        return count / sum(len(slot.positions) for slot in volume.slots)


def _sorted_into(boxes: Labels, count: int) -> list[Labels]:
    """For each of `count` boxes, the indices of the items in it; −1 is none."""
    order = np.argsort(boxes, kind="stable")
    return np.split(order, np.searchsorted(boxes[order], np.arange(count + 1)))[1:-1] if count else []


def _counted(units: Labels, places: Labels) -> tuple[Labels, Labels, Labels]:
    """Units (−1 is none), the places (which ascend) where each occurs, and how often; in order of units, then places."""
    here = np.flatnonzero(units >= 0)
    order = here[np.argsort(units[here], kind="stable")]
    units, places = units[order], places[order]
    bounds = np.flatnonzero((np.diff(units, prepend=-1) != 0) | (np.diff(places, prepend=-1) != 0))
    return units[bounds], places[bounds], np.diff(bounds, append=len(units))


def _rows(units: Labels, values: Labels) -> dict[int, bytes]:
    """All values of each unit as bytes, to be compared. Units ascend."""
    width = values[:1].nbytes
    content = np.ascontiguousarray(values).tobytes()
    bounds = np.flatnonzero(np.diff(units, prepend=-1, append=-1))
    ends = (bounds[1:] * width).tolist()
    starts = (bounds[:-1] * width).tolist()
    return {unit: content[a:b] for unit, a, b in zip(units[bounds[:-1]].tolist(), starts, ends, strict=True)}


def _named(volumes: list[Volume], first_use: dict[str, int]) -> list[Volume]:
    """A volume is called after the first module that writes it; further ones of that name are numbered."""
    taken: dict[str, int] = defaultdict(int)
    for volume in sorted(volumes, key=lambda volume: bool(volume.pinned)):
        slot = min(volume.slots, key=lambda slot: (slot.role != WRITES, slot.role != SCALES, first_use[slot.tensor]))
        base = slot.tensor.rpartition(".")[0] or slot.tensor
        taken[base] += 1
        volume.name = base if taken[base] == 1 else f"{base}#{taken[base]}"
    return volumes
