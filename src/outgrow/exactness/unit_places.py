"""Where the units of one volume lie in the values of a trace: along which axes, and in which parameters."""

from __future__ import annotations

from outgrow.analysis.labels import Labels, Layout
from outgrow.analysis.unit_states import Ratio, Refused
from outgrow.analysis.volumes import Anatomy, Volume


class UnitPlaces:
    """Finds a volume's units in the layouts of values. It changes nothing."""

    def __init__(self, anatomy: Anatomy, volume: Volume) -> None:
        self.anatomy, self.volume, self.reading = anatomy, volume, anatomy.reading
        self._lookup = anatomy.unit_lookup(volume)

    def ids(self, labels: Labels) -> Labels:
        return self._lookup.ids(labels)

    def axes(self, layout: Layout) -> set[int]:
        """Axes along which the volume's units lie."""
        return {block.axes[position] for block in layout for position in self._lookup.along(block.labels)}

    def carries(self, value: int) -> bool:
        """Whether units lie along any axis of a value."""
        return bool(self.axes(self.reading.layouts[value]))

    def origins(self, layout: Layout) -> frozenset[str]:
        """Names of the tensors that the volume's labels in a layout come from."""
        return frozenset(tensor for tensor, _ in self.slots_in(layout))

    def unscaled(self, layout: Layout) -> frozenset[tuple[str, str]]:
        return frozenset((name, "") for name in self.origins(layout))

    def slots_in(self, layout: Layout) -> set[tuple[str, int]]:
        return {key for block in layout for key in self._lookup.born(block.labels)}

    def ratio(self, layout: Layout, axes: frozenset[int], whole: bool) -> Ratio:
        """How the number of entries over `axes` changes with each new unit; `whole`: the axes must hold exactly the volume."""
        for block in layout:
            ids = self.ids(block.labels)
            if set(block.axes) & axes and (ids >= 0).any():
                if whole and ((ids < 0).any() or ids.size != self.volume.count):
                    raise Refused("a norm runs over it together with other units")
                return Ratio(ids.size, int((ids == self.volume.count - 1).sum()))
        raise Refused("a statistic runs over it in a way that outgrow does not understand")
