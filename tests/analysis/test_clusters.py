"""Units on connected grids, compared with a plain union of the sets that the chosen slices tie together."""

from __future__ import annotations

import numpy as np
import pytest

from outgrow.analysis.clusters import Grid, _grow_from, _Reach


def random_grids(seed: int) -> tuple[list[Grid], int]:
    """Grids that share some of their classes, in rows or columns or at random cells."""
    rng = np.random.default_rng(seed)
    count, grids = 80, []
    for _ in range(int(rng.integers(2, 8))):
        shape = tuple(int(size) for size in rng.integers(2, 5, size=int(rng.integers(2, 4))))
        classes = rng.choice(count, size=shape, replace=bool(rng.integers(2)))
        bound = [(rng.choice(count, size=size), axis) for axis, size in enumerate(shape) if rng.integers(3) == 0]
        grids.append(Grid(classes, bound))
    return grids, count


def united(grids: list[Grid], chosen: dict[int, int]) -> list[set[int]]:
    """Sets of classes that each slice ties together, united while any two overlap."""
    sets = []
    for index, axis in chosen.items():
        rows = np.moveaxis(grids[index].classes, axis, 0)
        bound = [names for names, along in grids[index].bound if along == axis]
        sets += [{*row.ravel().tolist(), *(int(names[n]) for names in bound)} for n, row in enumerate(rows)]
    result: list[set[int]] = []
    for one in sets:
        apart = [other for other in result if not other & one]
        result = [*apart, one.union(*(other for other in result if other & one))]
    return result


@pytest.mark.parametrize("seed", range(40))
def test_units_are_the_classes_that_slices_tie_together(seed: int) -> None:
    grids, count = random_grids(seed)
    reach = _Reach(grids, count)
    for start, grid in enumerate(grids):
        for axis in range(grid.classes.ndim):
            units, touched, chosen = _grow_from(grids, reach, start, axis)
            expected = {name: min(members) for members in united(grids, chosen) for name in members}
            assert dict(zip(touched.tolist(), units.tolist(), strict=True)) == expected


def test_a_long_chain_of_grids_is_merged_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs merged in all are in proportion to the number of grids, not to its square."""
    from outgrow.analysis import clusters

    merged: list[int] = []
    original = clusters.connected

    def counting(count: int, pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        merged.append(sum(len(left) for left, _ in pairs))
        return original(count, pairs)

    monkeypatch.setattr(clusters, "connected", counting)
    entries = []
    for length in (20, 80):
        grids = [Grid(np.arange(12).reshape(3, 4) + 6 * number, []) for number in range(length)]
        reach = _Reach(grids, 6 * length + 6)
        merged.clear()
        assert len(_grow_from(grids, reach, 0, 0)[2]) == length
        entries.append(sum(merged))
    assert entries[1] <= 5 * entries[0]
