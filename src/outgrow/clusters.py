"""From labels to units: which labels must be added together?

Equal labels are one *class*. Most classes are a unit by themselves. Those on a grid (heads × head-dim, groups × channels) can
only be added in whole slices, along the one axis or the other: each axis gives one *cluster* of units, and the clusters of one
grid are alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from outgrow.labels import Labels, Ties


@dataclass(frozen=True, eq=False)
class Cluster:
    """Units found together: `units[i]` is the unit of class `classes[i]` (ascending). Alternatives share a family."""

    classes: Labels
    units: Labels
    family: int


@dataclass(eq=False)
class Grid:
    """A grid of classes, and which classes stand for its slices along an axis."""

    classes: Labels
    bound: list[tuple[Labels, int]]


class Partition:
    """A small union-find over classes."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def find(self, item: int) -> int:
        root = item
        while self.parent.setdefault(root, root) != root:
            root = self.parent[root]
        while self.parent[item] != root:
            self.parent[item], item = root, self.parent[item]
        return root

    def union(self, one: int, other: int) -> None:
        a, b = self.find(one), self.find(other)
        if a != b:
            self.parent[max(a, b)] = min(a, b)

    def all_of(self, items: Labels) -> None:
        first, *rest = np.unique(items).tolist() or [None]
        if first is not None:
            self.find(first)
            for item in rest:
                self.union(first, item)


def find_clusters(ties: Ties, root: Labels) -> list[Cluster]:
    """All clusters: one of the plain classes, then one a direction of every connected set of grids."""
    grids, plain = _grids(ties, root)
    gridded = Partition()
    for grid in grids:
        gridded.all_of(grid.classes)
        for slices, _ in grid.bound:
            gridded.union(int(slices[0]), int(grid.classes.flat[0]))
            gridded.all_of(slices)
    clusters = [_plain_cluster(root, plain, gridded)]
    components: dict[int, list[Grid]] = {}
    for grid in grids:
        components.setdefault(gridded.find(int(grid.classes.flat[0])), []).append(grid)
    for family, members in enumerate(components.values(), start=1):
        seen: set[bytes] = set()
        for cluster in _directions(members, family):
            key = cluster.classes.tobytes() + cluster.units.tobytes()
            if key not in seen:
                seen.add(key)
                clusters.append(cluster)
    return clusters


def _grids(ties: Ties, root: Labels) -> tuple[list[Grid], list[tuple[Labels, Labels]]]:
    """Grids that still have two axes once classes are merged; bindings to the others are plain pairs."""
    grids: dict[tuple[tuple[int, ...], bytes], Grid] = {}
    plain: list[tuple[Labels, Labels]] = []

    def enter(array: Labels) -> tuple[Grid | None, list[int]]:
        kept = [axis for axis in range(array.ndim) if not (array == array.take([0], axis=axis)).all()]
        small = array[tuple(slice(None) if axis in kept else 0 for axis in range(array.ndim))]
        if len(kept) < 2:
            return None, kept
        return grids.setdefault((small.shape, small.tobytes()), Grid(small, [])), kept

    for labels in ties.grids.values():
        enter(root[labels])
    for slices, labels, axis in ties.bindings:
        array, names = root[labels], root[slices]
        grid, kept = enter(array)
        if grid is not None and axis in kept:
            bound = (names, kept.index(axis))
            if not any(a == bound[1] and np.array_equal(n, names) for n, a in grid.bound):
                grid.bound.append(bound)
        else:
            rows = np.moveaxis(array, axis, 0).reshape(len(names), -1)
            plain.append((np.repeat(names, rows.shape[1]), rows.ravel()))
    return list(grids.values()), plain


def _plain_cluster(root: Labels, plain: list[tuple[Labels, Labels]], gridded: Partition) -> Cluster:
    merged = Partition()
    for left, right in plain:
        for one, other in np.unique(np.stack([left, right]), axis=1).T.tolist():
            if one not in gridded.parent and other not in gridded.parent:
                merged.union(one, other)
    classes = np.unique(root)
    if gridded.parent:
        taken = np.fromiter(gridded.parent, dtype=np.int64)
        classes = np.setdiff1d(classes, taken, assume_unique=True)
    units = classes.copy()
    for item in merged.parent:
        units[np.searchsorted(classes, item)] = merged.find(item)
    return Cluster(classes, units, 0)


def _directions(grids: list[Grid], family: int) -> Iterator[Cluster]:
    for seed, grid in enumerate(grids):
        for axis in range(grid.classes.ndim):
            partition, touched = _grow_from(grids, seed, axis)
            classes = np.array(sorted(touched), dtype=np.int64)
            units = np.array([partition.find(item) for item in classes.tolist()], dtype=np.int64)
            yield Cluster(classes, units, family)


def _grow_from(grids: list[Grid], seed: int, axis: int) -> tuple[Partition, set[int]]:
    """Slice the seed grid along `axis`, then every grid that this reaches, until nothing more is touched."""
    partition, touched = Partition(), set[int]()
    chosen: dict[int, int] = {}

    def decide(index: int, along: int) -> None:
        chosen[index] = along
        rows = np.moveaxis(grids[index].classes, along, 0)
        for row in rows.reshape(len(rows), -1):
            partition.all_of(row)
        touched.update(np.unique(rows).tolist())
        for names, bound_axis in grids[index].bound:
            if bound_axis == along:
                for name, row in zip(names.tolist(), rows.reshape(len(rows), -1), strict=True):
                    partition.union(name, int(row[0]))
                touched.update(names.tolist())

    decide(seed, axis)
    while True:
        before = len(chosen)
        for index, grid in enumerate(grids):
            if index in chosen:
                continue
            forced = next((a for names, a in grid.bound if not touched.isdisjoint(names.tolist())), None)
            if forced is not None:
                decide(index, forced)
            elif not touched.isdisjoint(grid.classes.ravel().tolist()):
                decide(index, _best_axis(grid, partition, touched))
        if len(chosen) == before:
            return partition, touched


def _best_axis(grid: Grid, partition: Partition, touched: set[int]) -> int:
    """The axis along which what is decided already varies; else the one that keeps units smallest."""
    ids = np.vectorize(lambda item: partition.find(item) if item in touched else -1, otypes=[np.int64])(grid.classes)
    varying = [a for a in range(ids.ndim) if not (ids == ids.take([0], axis=a)).all()]
    if len(varying) == 1:
        return varying[0]
    return max(range(ids.ndim), key=lambda a: ids.shape[a])
