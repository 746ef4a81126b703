"""Forbid growth of volumes that may also lie in unused parameters.

If the example does not run a module that reads a volume, the volume would grow without that module, and the model would fail on
other data. The trace does not show the connections of such a module, so sizes decide: an unused parameter inside the volume's
module may belong to the volume if one of its axes is as long as one of the volume's. The volume's module is the innermost one
that holds all its slots and does not return the volume's units.
"""

from __future__ import annotations

import numpy as np

from outgrow.analysis.volumes import Anatomy, Volume


def pin_doubtful(anatomy: Anatomy) -> None:
    """Pin volumes to which unused parameters may belong."""
    trace = anatomy.reading.trace
    unused = trace.unused
    if not unused:
        return
    shapes = {value.name: value.shape for value in trace.values if value.name}
    for volume in anatomy.volumes:
        if volume.pinned and not volume.extendable:
            continue
        home = _home(anatomy, volume)
        lengths = {shapes[slot.tensor][slot.axis] for slot in volume.slots} - {1}
        for name in unused:
            inside = not home or name.startswith(f"{home}.")
            if inside and not lengths.isdisjoint(shapes[name]):
                doubt = (
                    f"{name}, which the example does not run, may belong to it (an axis has the same size): pass an example "
                    "that runs it too"
                )
                volume.pinned, volume.obstacle = volume.pinned or doubt, doubt
                volume.extendable = False
                break


def _home(anatomy: Anatomy, volume: Volume) -> str:
    """The innermost module outside which a volume's units do not occur; empty for the model itself."""
    paths = [slot.tensor.split(".")[:-1] for slot in volume.slots]
    parts: list[str] = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        parts.append(steps[0])
    while parts and _puts_out(anatomy, volume, ".".join(parts)):
        parts.pop()
    return ".".join(parts)


def _puts_out(anatomy: Anatomy, volume: Volume, path: str) -> bool:
    """Whether a module returns a tensor with the volume's units; True if its return value is not known."""
    value = anatomy.reading.trace.returned.get(path)
    if value is None:
        return True
    layout = anatomy.reading.layouts[value]
    return any(bool(np.isin(anatomy.root[block.labels], volume.classes).any()) for block in layout)
