"""Find the volumes in an interpreted trace.

Units with the same slots (the same axes of the same tensors, equally often) form a volume. At each slot, a new unit's positions
follow the last unit of every run: so concatenations, flattened axes, fused qkv and grouped layouts stay correct.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.attention_products import HEAD_DIM, HEADS
from outgrow.analysis.clusters import Cluster, find_clusters
from outgrow.analysis.effects import Contract, Move
from outgrow.analysis.interpret_trace import Reading
from outgrow.analysis.labels import FREQUENCIES, INTERFACE, LOOKED_UP, Labels, narrowest, numbered
from outgrow.analysis.residual_sums import SPLITTING
from outgrow.analysis.roles import SCALES, SHIFTS, WRITES, find_roles
from outgrow.analysis.volume_kinds import set_kinds
from outgrow.analysis.volumes import Anatomy, AxisLabels, Volume

NO_MULTIPLICITIES: Mapping[str, int] = {}

INDEXED = (
    "it is looked up",
    "the code selects one of its indices",
    "the code splits it into single indices",
    "experts are chosen",
)


def find_volumes(reading: Reading, multiplicities: Mapping[str, int] = NO_MULTIPLICITIES) -> Anatomy:
    """Resolve the labels of a reading and group its units into volumes.

    `multiplicities`: the number of tensors that a tensor represents, if one block stands for several (see
    `analysis/lengthen_stacks.py`).
    """
    root = reading.ties.classes()
    finder = _Finder(reading, root, multiplicities)
    volumes: list[Volume] = []
    for cluster in find_clusters(reading.ties, root):
        volumes.extend(finder.volumes_of(cluster, len(volumes)))
    first = {id(volume): finder.first_use(volume) for volume in volumes}
    rivals = Counter(first.values())
    volumes.sort(key=lambda v: (first[id(v)], finder.cycles(v) if rivals[first[id(v)]] > 1 else 0.0))
    leads = {id(volume): finder.lead(volume) for volume in volumes}
    _name(volumes, [(finder.births.origins[leads[id(v)]].tensor, int(finder.rank[leads[id(v)]])) for v in volumes])
    anatomy = Anatomy(reading, root, tuple(volumes))
    set_kinds(anatomy)
    headed = _headed(anatomy)
    for volume in volumes:
        volume.rotary = volume.rotary and volume.kind == HEAD_DIM
        if volume.family >= 1 and volume.family not in headed and volume.kind not in (HEADS, HEAD_DIM):
            places = finder.births.owner[volume.labels] == leads[id(volume)]
            volume.grain = int(np.count_nonzero(places)) // volume.count
    return anatomy


def _headed(anatomy: Anatomy) -> set[int]:
    """Families with units in a product of two activations: heads and their features, whose size is the number of units.

    All other grids are groups of channels, whose size is the number of channels.
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


def _pinned(reading: Reading, root: Labels) -> tuple[Labels, Labels, list[str], NDArray[np.bool_]]:
    """Classes that can't grow (the most important reasons first), the index of each one's reason, and the reasons.

    Also, for each reason, whether it is the model's interface, to which entries can be appended.
    """
    classes = [root[labels] for labels, _, _ in reading.ties.fixed]
    texts = [f"{reason} ({module})" if module else reason for _, reason, module in reading.ties.fixed]
    used = _used(reading, root)
    for labels, reason, _ in reading.ties.fixed:
        if reason == LOOKED_UP:  # rows that nothing but a lookup takes
            used[root[labels]] = True
    births = root[: sum(origin.size for origin in reading.ties.origins)]
    classes.append(births[~used[births]])
    texts.append("the model computes nothing with it")
    interface = np.array([*(reason in INTERFACE for _, reason, _ in reading.ties.fixed), False])
    return np.concatenate(classes), np.repeat(np.arange(len(classes)), [len(part) for part in classes]), texts, interface


def _used(reading: Reading, root: Labels) -> NDArray[np.bool_]:
    """Which classes reach an operator that computes something: rows that are only ever sliced away never do.

    Where a view merges two axes of a parameter, operators see the labels of a grid, to which those of the axes are bound.
    """
    used = np.zeros(len(root), dtype=np.bool_)
    values = {
        ref.value
        for op, effect in zip(reading.trace.ops, reading.effects, strict=True)
        if not isinstance(effect, Move)
        for ref in op.refs
    }
    for labels in {id(block.labels): block.labels for value in values for block in reading.layouts[value]}.values():
        used[root[labels]] = True
    for slices, grid, axis in reversed(reading.ties.bindings):  # later ones first: a grid may be an axis of a later one
        others = tuple(other for other in range(grid.ndim) if other != axis)
        used[root[slices[used[root[grid]].any(axis=others)]]] = True
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
    """Finds volumes in clusters."""

    def __init__(self, reading: Reading, root: Labels, multiplicities: Mapping[str, int]) -> None:
        self.root, self.multiplicities = root, multiplicities
        origins = reading.ties.origins
        owner = np.repeat(np.arange(len(origins), dtype=np.int32), [origin.size for origin in origins])
        vectors = {v.name for v in reading.trace.values if v.name and sum(size > 1 for size in v.shape) == 1}
        self.births = AxisLabels(origins, owner, find_roles(reading), vectors)
        self.classes = root[: len(owner)]
        self.unit_of = np.full(len(root), -1, dtype=narrowest(len(root)))  # by class, for the current cluster
        self.births_of = _Index(self.classes)
        self.pinned, reasons, texts, interface = _pinned(reading, root)
        self.hard = ~interface[reasons]  # by pin: whether it forbids new entries too
        self.pins_of = _Index(self.pinned)
        self.texts = sorted(set(texts))
        self.reasons = np.array([self.texts.index(text) for text in texts], dtype=np.int64)[reasons]
        first_use = _first_use(reading)
        rank = [_rank(self.births.roles.get((origin.tensor, origin.axis), {WRITES})) for origin in origins]
        self.uses = np.array([first_use[origin.tensor] for origin in origins], dtype=np.int64)
        self.rank = np.array(rank, dtype=np.int64)  # by axis: 0 if it writes, 1 if it scales, 2 if it only reads
        self.leading = self.rank * (len(reading.trace.ops) + 1) + self.uses
        parts = [
            (output, np.unique(root[block.labels]))
            for op in reading.trace.ops
            if op.name in SPLITTING
            for output in op.outputs
            for block in reading.layouts[output]
        ]
        self.part_output = np.array([output for output, _ in parts], dtype=np.int64)
        self.part_classes = np.concatenate([np.zeros(0, dtype=np.int64), *(classes for _, classes in parts)])
        self.part = np.repeat(np.arange(len(parts)), [len(classes) for _, classes in parts])
        self.parts_of = _Index(self.part_classes)

    def volumes_of(self, cluster: Cluster, start: int) -> list[Volume]:
        if not len(cluster.classes) or not self.births.origins:
            return []
        names, numbers = np.unique(cluster.units, return_inverse=True)  # units are numbered within their cluster
        self.unit_of[cluster.classes] = numbers
        positions = self.births_of.find(cluster.classes)
        units, owner = self.unit_of[self.classes[positions]], self.births.owner[positions]
        groups = self._alike(cluster.classes, len(names), units, owner)
        self.unit_of[cluster.classes] = -1
        volume = np.full(len(names), -1, dtype=np.int64)  # by unit
        number = np.zeros(len(names), dtype=np.int64)  # by unit: its number in its volume
        for index, (members, _) in enumerate(groups):
            volume[members] = index
        standing, owned = (_sorted_into(volume[of], len(groups)) for of in (units, numbers))
        result: list[Volume] = []
        for (members, reason), here, mine in zip(groups, standing, owned, strict=True):
            at_first = here[: np.searchsorted(owner[here], owner[here[0]], side="right")]
            order = units[at_first]  # units are numbered as they stand at their first slot
            if len(order) > len(members):
                there, first = np.unique(order, return_index=True)
                order = there[np.argsort(first)]
            number[order] = np.arange(len(members))
            family = cluster.family if cluster.family else -(start + len(result)) - 2
            if cluster.torn:
                reason = reason or "the code ties its units along two axes at once"
            if (self.rank[owner[here]] == 2).all():
                reason = reason or "it reads a constant, such as padding, whose size the code sets"
            own = cluster.classes[mine], number[numbers[mine]]
            volume_here = Volume("", len(members), positions[here].astype(np.int64), self.births, *own, family, reason)
            if reason.startswith(INTERFACE):
                volume_here.obstacle = self._obstacle(cluster, own[0])
                volume_here.extendable = not volume_here.obstacle
            if reason.startswith(FREQUENCIES) and not cluster.torn:
                pins = self.reasons[self.pins_of.find(own[0])]
                volume_here.rotary = all(self.texts[pin].startswith(FREQUENCIES) for pin in np.unique(pins).tolist())
            result.append(volume_here)
        return result

    def _obstacle(self, cluster: Cluster, classes: Labels) -> str:
        """Why nothing can be appended to units that are outputs of the model, or indexed by its input; empty if it can."""
        if cluster.family or cluster.torn:
            return "its units lie on a grid, along several axes"
        pins = self.pins_of.find(classes)
        hard = pins[self.hard[pins]]
        return self.texts[self.reasons[hard[0]]] if len(hard) else ""

    def _alike(self, classes: Labels, count: int, units: Labels, owner: NDArray[Any]) -> list[tuple[Labels, str]]:
        """Groups of two or more units with the same slots that are split and pinned alike, each with the reason if pinned."""
        bearers, owners, times = _counted(units, owner)
        span = int(times.max(initial=0)) + 1
        owners = owners.astype(narrowest(span * (int(owners.max(initial=0)) + 1)), copy=False)
        owners *= span
        owners += times
        there, slots = _kinds(bearers, owners)
        del bearers, owners, times
        marks, reasons = (np.full(count, -1, dtype=np.int64) for _ in range(2))  # by unit
        apart = self.parts_of.find(classes)
        marked, parts, _ = _counted(self.unit_of[self.part_classes[apart]], self.part[apart])
        marked, kinds = _kinds(marked, self.part_output[parts])
        marks[marked] = kinds
        here = self.pins_of.find(classes)[::-1]  # written last: the most important reason
        reasons[self.unit_of[self.pinned[here]]] = self.reasons[here]
        which = numbered([slots, marks[there], reasons[there]])
        groups = [there[members] for members in _sorted_into(which, int(which.max()) + 1)] if len(there) else []
        groups.sort(key=lambda members: int(members[0]))
        why = ((members, int(reasons[members[0]])) for members in groups if len(members) > 1)
        return [(members, self.texts[reason] if reason >= 0 else "") for members, reason in why]

    def first_use(self, volume: Volume) -> int:
        """The first operator that uses one of its parameters."""
        return int(self.uses[self.births.owner[volume.labels]].min())

    def lead(self, volume: Volume) -> int:
        """The axis that names a volume: the first that writes it, else the first that scales it, else the first."""
        owners = self.births.owner[volume.labels]
        return int(owners[np.argmin(self.leading[owners])])

    def cycles(self, volume: Volume) -> float:
        """Runs of units per position of the volume: heads have fewer than the features of a head."""
        last = np.zeros(len(self.root), dtype=np.int8)
        last[volume.classes[volume.units == volume.count - 1]] = 1
        count = positions = 0
        for number, held in zip(*np.unique(self.births.owner[volume.labels], return_counts=True), strict=True):
            origin = self.births.origins[number]
            mine = last[self.classes[origin.start : origin.start + origin.size]]
            times = self.multiplicities.get(origin.tensor, 1)
            count += times * (int(mine[0]) + int(np.count_nonzero(mine[1:] > mine[:-1])))
            positions += times * int(held)
        return count / positions


class _Index:
    """Where classes occur in an array of classes."""

    def __init__(self, classes: Labels) -> None:
        narrow = narrowest(max(len(classes), int(classes.max(initial=0))))
        self.order = np.argsort(classes, kind="stable").astype(narrow)
        self.sorted = classes[self.order].astype(narrow)

    def find(self, classes: Labels) -> Labels:
        """The ascending positions of some distinct classes in the array."""
        first, end = (np.searchsorted(self.sorted, classes, side=side) for side in ("left", "right"))
        counts = end - first
        del first
        index = np.repeat(end - np.cumsum(counts), counts)
        index += np.arange(len(index), dtype=self.order.dtype)
        found: Labels = self.order[index]
        found.sort()
        return found


def _sorted_into(boxes: Labels, count: int) -> list[Labels]:
    """For each of `count` boxes, the indices of the items in it; −1 is none."""
    order = np.argsort(boxes, kind="stable").astype(narrowest(len(boxes)))
    return np.split(order, np.searchsorted(boxes[order], np.arange(count + 1)))[1:-1] if count else []


def _counted(units: Labels, places: NDArray[Any]) -> tuple[Labels, Labels, Labels]:
    """Units (−1 is none), the places where each occurs, and how often; in order of units, then places."""
    span, held = int(places.max(initial=0)) + 1, units >= 0
    if not held.all():
        units, places = units[held], places[held]
    del held
    keys = units.astype(np.int64)
    keys *= span
    keys += places
    keys.sort(kind="stable")  # fast on long runs
    first = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    bounds, found = np.flatnonzero(first), keys[first]
    del keys, first  # large for models with many layers
    times = np.diff(bounds, append=len(places)).astype(narrowest(len(places)))
    del bounds
    bearers = (found // span).astype(narrowest(int(units.max(initial=0))))
    found %= span
    return bearers, found.astype(narrowest(span)), times


def _kinds(units: Labels, values: Labels) -> tuple[Labels, Labels]:
    """The units (ascending), and for each a number: units with equal rows of values have equal numbers."""
    if not len(units):
        return units, units
    starts = np.flatnonzero(np.diff(units, prepend=-1))
    lengths = np.diff(starts, append=len(units))
    back = np.arange(len(units), dtype=narrowest(len(units)))
    back -= np.repeat(lengths.astype(back.dtype), lengths)  # the row of the previous unit, if it is as long
    same = np.logical_and.reduceat(values == values[back], starts)
    same &= lengths == np.roll(lengths, 1)
    same[0] = False
    seen: dict[bytes, int] = {}
    heads = np.flatnonzero(~same)
    numbers = [
        seen.setdefault(values[start:end].tobytes(), len(seen))
        for start, end in zip(starts[heads].tolist(), (starts + lengths)[heads].tolist(), strict=True)
    ]
    return units[starts], np.repeat(numbers, np.diff(heads, append=len(starts)))


def _rank(roles: set[str]) -> int:
    return 0 if WRITES in roles else 1 if roles & {SCALES, SHIFTS} else 2


def _name(volumes: list[Volume], leads: list[tuple[str, int]]) -> None:
    """Name volumes after the module of their leading tensor; further volumes of the same name are numbered.

    Which one has the plain name depends on its role, not on whether it can grow: first the volume that a module writes, then
    one that it scales, then one that it reads, and last volumes that are looked up by index, as the words of an embedding.
    """
    taken: dict[str, int] = defaultdict(int)
    pairs = zip(volumes, leads, strict=True)
    for volume, (tensor, _) in sorted(pairs, key=lambda pair: (pair[0].pinned.startswith(INDEXED), pair[1][1])):
        base = (tensor.rpartition(".")[0] or tensor).partition(".parametrizations.")[0]
        taken[base] += 1
        volume.name = base if taken[base] == 1 else f"{base}#{taken[base]}"
