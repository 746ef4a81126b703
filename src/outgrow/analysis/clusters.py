"""From labels to units: which labels must grow together?

Equal labels are one *class*. Most classes are a unit by themselves. Classes on a grid (heads × head-dim, groups × channels)
can only be added in whole slices along one of its axes: each axis gives one *cluster* of units, and the clusters of a grid are
alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outgrow.analysis.labels import Labels, Ties, connected


@dataclass(frozen=True, eq=False)
class Cluster:
    """Units found together: `units[i]` is the unit of class `classes[i]` (ascending). Alternatives share a family."""

    classes: Labels
    units: Labels
    family: int
    torn: bool = False  # True if it would have to grow along two axes of one grid


@dataclass(eq=False)
class Grid:
    """A grid of classes, and the classes that are bound to its slices along an axis."""

    classes: Labels
    bound: list[tuple[Labels, int]]

    def parts(self) -> list[Labels]:
        """Its classes, and each set of bound classes together with one of the grid's own."""
        return [self.classes, *(np.append(names, self.classes.flat[0]) for names, _ in self.bound)]


def find_clusters(ties: Ties, root: Labels) -> list[Cluster]:
    """All clusters: one of the plain classes, then one per direction of every connected set of grids."""
    grids, plain = _grids(ties, root)
    together = [_with_first(part) for grid in grids for part in grid.parts()]
    component = connected(len(root), together)
    gridded = np.zeros(len(root), dtype=bool)
    for grid in grids:
        for part in grid.parts():
            gridded[part] = True
    clusters = [_plain_cluster(root, plain, gridded)]
    members: dict[int, list[Grid]] = {}
    for grid in grids:
        members.setdefault(int(component[grid.classes.flat[0]]), []).append(grid)
    for family, connected_grids in enumerate(members.values(), start=1):
        seen: set[bytes] = set()
        for cluster in _directions(connected_grids, family):
            key = cluster.classes.tobytes() + cluster.units.tobytes()
            if key not in seen:
                seen.add(key)
                clusters.append(cluster)
    return clusters


def _with_first(items: Labels) -> tuple[Labels, Labels]:
    """Pairs that tie all items together."""
    flat = items.ravel()
    return np.full(len(flat), flat[0]), flat


def _grids(ties: Ties, root: Labels) -> tuple[list[Grid], list[tuple[Labels, Labels]]]:
    """Grids that still have two axes after classes are merged, and the bindings to other grids as plain pairs."""
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


def _plain_cluster(root: Labels, plain: list[tuple[Labels, Labels]], gridded: NDArray[np.bool_]) -> Cluster:
    """The cluster of classes on no grid; classes that are bound one to one are one unit."""
    pairs = []
    for left, right in plain:
        free = ~gridded[left] & ~gridded[right]
        pairs.append((left[free], right[free]))
    units = connected(len(root), pairs)
    classes = np.flatnonzero(root == np.arange(len(root)))  # a class is named by its smallest label
    classes = classes[~gridded[classes]]
    return Cluster(classes, units[classes], 0)


def _directions(grids: list[Grid], family: int) -> Iterator[Cluster]:
    """The clusters from slicing the grids along every axis; axes that an earlier cluster has used are skipped."""
    everything = np.unique(np.concatenate([part.ravel() for grid in grids for part in grid.parts()]))
    local = [
        Grid(
            np.searchsorted(everything, grid.classes),
            [(np.searchsorted(everything, names), axis) for names, axis in grid.bound],
        )
        for grid in grids
    ]
    reach = _Reach(local, len(everything))
    tried: set[tuple[int, int]] = set()
    for seed, grid in enumerate(local):
        for axis in range(grid.classes.ndim):
            if (seed, axis) in tried:
                continue
            units, touched, chosen = _grow_from(local, reach, seed, axis)
            tried |= set(chosen.items())
            reached = np.zeros(len(everything), dtype=np.bool_)
            reached[touched] = True
            torn = any(
                reached[names].any() for index, along in chosen.items() for names, bound in local[index].bound if bound != along
            )
            yield Cluster(everything[touched], everything[units], family, torn)


class _Reach:
    """For each class, the grids that contain it or that it is bound to."""

    def __init__(self, grids: list[Grid], count: int) -> None:
        parts = [np.concatenate([grid.classes.ravel(), *(names for names, _ in grid.bound)]) for grid in grids]
        classes = np.concatenate(parts)
        order = np.argsort(classes, kind="stable")
        self.count = count
        self.grids = np.repeat(np.arange(len(grids)), [len(part) for part in parts])[order]
        self.first = np.searchsorted(classes[order], np.arange(count + 1))

    def of(self, classes: Labels) -> list[int]:
        counts = self.first[classes + 1] - self.first[classes]
        index = np.repeat(self.first[classes] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        found: list[int] = np.unique(self.grids[index]).tolist()
        return found


class _Merged:
    """Units of classes, as pairs of classes are merged: pairs wait until units are needed, and are then merged once.

    Merging all pairs again whenever units are needed would take a time that is quadratic in the number of grids.
    """

    def __init__(self, count: int) -> None:
        self.units: Labels = np.arange(count)  # for each class, the smallest class that a chain of pairs connects it with
        self.waiting: list[tuple[Labels, Labels]] = []

    def add(self, left: Labels, right: Labels) -> None:
        self.waiting.append((left, right))

    def of(self, classes: Labels) -> Labels:
        if self.waiting:
            pairs = [(self.units[left], self.units[right]) for left, right in self.waiting]
            self.units, self.waiting = connected(len(self.units), pairs)[self.units], []
        found: Labels = self.units[classes]
        return found


def _grow_from(grids: list[Grid], reach: _Reach, seed: int, axis: int) -> tuple[Labels, Labels, dict[int, int]]:
    """Slice the seed grid along `axis`, then every grid that this reaches, until nothing more is touched.

    Returns the units of the classes that are touched, these classes, and along which axis each grid was sliced. Grids are
    visited in rounds, in order; a grid that is reached from a later one is visited in the next round.
    """
    touched = np.zeros(reach.count, dtype=bool)
    merged = _Merged(reach.count)
    chosen: dict[int, int] = {}
    waiting: set[int] = set()

    def touch(classes: Labels) -> None:
        new = classes[~touched[classes]]
        touched[new] = True
        waiting.update(reach.of(np.unique(new)))

    def decide(index: int, along: int) -> None:
        chosen[index] = along
        rows = np.moveaxis(grids[index].classes, along, 0)
        rows = rows.reshape(len(rows), -1)
        merged.add(np.repeat(rows[:, 0], rows.shape[1]), rows.ravel())
        touch(rows.ravel())
        for names, bound_axis in grids[index].bound:
            if bound_axis == along:
                merged.add(names, rows[:, 0])
                touch(names)

    decide(seed, axis)
    position = -1
    while waiting := waiting - chosen.keys():
        ahead = [index for index in waiting if index > position]
        if not ahead:
            position = -1
            continue
        position = min(ahead)
        grid = grids[position]
        forced = next((a for names, a in grid.bound if touched[names].any()), None)
        decide(position, forced if forced is not None else _best_axis(grid, merged, touched))
    found = np.flatnonzero(touched)
    return merged.of(found), found, chosen


def _best_axis(grid: Grid, merged: _Merged, touched: NDArray[np.bool_]) -> int:
    """The axis along which slicing merges the fewest of the units that reach the grid."""
    cells = np.argwhere(touched[grid.classes])
    ids = np.unique(merged.of(grid.classes[tuple(cells.T)]), return_inverse=True)[1].reshape(-1)
    count = int(ids.max()) + 1

    def left_apart(axis: int) -> tuple[int, int]:
        size = grid.classes.shape[axis]
        parts = connected(count + size, [(ids, count + cells[:, axis])])
        return len(np.unique(parts[:count])), size

    return max(range(grid.classes.ndim), key=left_apart)
