"""Sizes that the code gives to two volumes at once: a volume may not grow by itself if it shares a size with one that can't.

Llama's attention splits queries, keys and values by one shape, `(batch, length, -1, head_dim)`. The size of a value head could
differ from that of a query head, which position encodings fix, but the code has one number for both. A growth finds this by
running the model with the new size; the list of volumes, which runs nothing, names the suspicion.
"""

from __future__ import annotations

from collections import defaultdict

from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op

SPLITS = {"view", "_unsafe_view", "reshape"}
Key = tuple[str, tuple[int, ...]]  # a module, and the sizes that its code passes


class SameSizes:
    """The views of a trace, by module and sizes."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.views: dict[Key, list[Op]] = defaultdict(list)
        for op in anatomy.reading.trace.ops:
            if (key := _key(op)) is not None:
                self.views[key].append(op)

    def reason(self, volume: Volume) -> str:
        """Why a growth of this volume alone may be refused; empty if nothing speaks against it."""
        for index in self.anatomy.ops_of[volume.name]:
            op = self.anatomy.reading.trace.ops[index]
            key = _key(op)
            for other in self.views[key] if key is not None else ():
                for number in self._volumes_at(other):
                    fixed = self.anatomy.volumes[number]
                    axes = self._axes(op, volume) & self._axes(other, fixed) if fixed.pinned and fixed is not volume else set()
                    if key is not None and any(key[1][axis] > 1 for axis in axes if axis < len(key[1])):
                        found = f"the code of {key[0] or 'the model'} gives it the same size as {fixed.name}, "
                        found += "which grows by whole factors of kind='head_dim'" if fixed.rotary else "which can't grow"
                        return f"a growth of it alone may be refused: {found}"
        return ""

    def _volumes_at(self, op: Op) -> set[int]:
        layout = self.anatomy.reading.layouts[op.outputs[0]]
        return {number for block in layout for number in self.anatomy.volumes_by_label.of(block.labels)}

    def _axes(self, op: Op, volume: Volume) -> set[int]:
        """The axes of a view's result along which the units of a volume change."""
        found: set[int] = set()
        for block in self.anatomy.reading.layouts[op.outputs[0]]:
            units = self.anatomy.units(volume, block.labels)
            if (units >= 0).any():
                found |= {axis for place, axis in enumerate(block.axes) if (units != units.take([0], axis=place)).any()}
        return found


def _key(op: Op) -> Key | None:
    if base_name(op) not in SPLITS or len(op.args) < 2 or not isinstance(op.args[1], tuple):
        return None
    sizes = op.args[1]
    return (op.module, sizes) if all(isinstance(size, int) for size in sizes) and -1 in sizes else None
