"""Positions of a volume's units along the axes of its slots."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from outgrow.analysis.labels import Labels
from outgrow.analysis.volumes import Anatomy, Slot, Volume
from outgrow.errors import Problem


class Irregular(Exception):
    """Raised if the units of a volume do not form plain runs at a slot."""


def unit_runs(ids: Labels, size: int) -> list[Labels]:
    """Positions of units as arrays (run, unit, offset), one per length: each unit has as many adjacent positions in a run.

    Runs differ in length where query heads share keys: q has several rows of heads per unit, and k and v behind it have one.
    """
    mine = np.flatnonzero(ids >= 0)
    order = mine[np.argsort(ids[mine], kind="stable")]
    if len(order) % size:
        raise Irregular
    by_unit = order.reshape(size, -1)  # the n-th position of each unit
    starts = [0, *(np.flatnonzero(np.diff(by_unit[-1]) != 1) + 1).tolist()]
    runs = [by_unit[:, start:end] for start, end in pairwise([*starts, by_unit.shape[1]])]
    flat = np.concatenate([run.reshape(-1) for run in runs])
    if (np.diff(flat) <= 0).any():
        raise Irregular
    lengths = dict.fromkeys(run.shape[1] for run in runs)
    return [np.stack([run for run in runs if run.shape[1] == length]) for length in lengths]


def slot_ids(anatomy: Anatomy, volume: Volume, slot: Slot) -> Labels:
    """Unit numbers along the axis of a slot, as of the time of the analysis."""
    origin = anatomy.origin[slot.tensor, slot.axis]
    return anatomy.units(volume, np.arange(origin.start, origin.start + origin.size))


def irregular(anatomy: Anatomy, volume: Volume) -> Problem | None:
    """The problem, if a volume's units do not form runs at one of its slots; None otherwise."""
    for slot in volume.slots:
        try:
            unit_runs(slot_ids(anatomy, volume, slot), volume.count)
        except Irregular:
            return Problem(slot.tensor, f"the units of {volume.name} are in no regular order along axis {slot.axis}")
    return None
