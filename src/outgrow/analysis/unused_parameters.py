"""Volumes that may also lie in parameters which no operator has used: they can't grow.

A stream that a module reads which the example does not run would grow without it, and the model would fail on other data.
Nothing shows what such a module is connected with, so the sizes decide: an axis as long as one of the volume's own, in a
parameter that is part of the module that the volume stays within. A volume stays within the innermost module that holds all its
slots, unless that module puts it out: then its surroundings see it too, and what they hold counts.
"""

from __future__ import annotations

import numpy as np

from outgrow.analysis.volumes import Anatomy, Volume


def pin_doubtful(anatomy: Anatomy) -> None:
    """Mark volumes that unused parameters may belong to as ones that can't grow."""
    trace = anatomy.reading.trace
    unused = trace.unused
    if not unused:
        return
    shapes = {value.name: value.shape for value in trace.values if value.name}
    for volume in anatomy.volumes:
        if volume.pinned:
            continue
        home = _home(anatomy, volume)
        lengths = {shapes[slot.tensor][slot.axis] for slot in volume.slots} - {1}
        for name in unused:
            inside = not home or name.startswith(f"{home}.")
            if inside and not lengths.isdisjoint(shapes[name]):
                volume.pinned = (
                    f"{name}, which the example does not run, may belong to it (an axis has the same size): give an example "
                    "that runs it too"
                )
                break


def _home(anatomy: Anatomy, volume: Volume) -> str:
    """The innermost module beyond which nothing of a volume is seen; empty for the model itself."""
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
    """Whether a module returns a tensor along the volume; if it returns none that is known, it may."""
    value = anatomy.reading.trace.returned.get(path)
    if value is None:
        return True
    layout = anatomy.reading.layouts[value]
    return any(bool(np.isin(anatomy.root[block.labels], volume.classes).any()) for block in layout)
