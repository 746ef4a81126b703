"""Positions of a volume's units along the axes of its slots."""

from __future__ import annotations

import numpy as np

from outgrow.analysis.labels import Labels
from outgrow.analysis.volumes import Anatomy, Slot, Volume
from outgrow.errors import Problem


class Irregular(Exception):
    """Raised if the units of a volume do not form plain runs at a slot."""


def unit_runs(ids: Labels, size: int) -> Labels:
    """Positions of units as an array (run, unit, offset): runs of ordered units, each unit on a few adjacent positions."""
    mine = np.flatnonzero(ids >= 0)
    order = mine[np.argsort(ids[mine], kind="stable")]
    if len(order) % size:
        raise Irregular
    by_unit = order.reshape(size, -1)
    last = by_unit[-1]
    breaks = np.flatnonzero(np.diff(last) != 1)
    length = int(breaks[0]) + 1 if len(breaks) else len(last)
    if by_unit.shape[1] % length:
        raise Irregular
    table = by_unit.reshape(size, -1, length).transpose(1, 0, 2)
    flat = table.reshape(-1)
    if (np.diff(flat) <= 0).any():
        raise Irregular
    return np.asarray(table)


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
