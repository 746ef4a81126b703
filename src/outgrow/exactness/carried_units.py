"""What each value of a trace carries of a volume: in which state its new units are, at which scale, who wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from outgrow.analysis.effects import Map
from outgrow.analysis.labels import Layout
from outgrow.analysis.repeated_blocks import Lookups
from outgrow.analysis.roles import SCALES
from outgrow.analysis.unit_states import STRICTNESS, Carried, Refused, State, Verdict, blended
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.trace.operators import Op


class Findings:
    """What a walk has found so far for one volume, with its new units in one state at the writers."""

    def __init__(self, places: UnitPlaces, start: State) -> None:
        self.places, self.start, self.reading = places, start, places.reading
        self.verdict = Verdict(start)
        self.known: dict[int, Carried] = {}
        self.looked_up = Lookups(states=self.known)
        self.op: Op = self.reading.trace.ops[0]  # where the walk is

    def carried(self, value: int, layout: Layout | None = None) -> Carried:
        """What is known of an operand; parameters are where the walk starts."""
        if value in self.known:
            return self.known[value]
        if not self.places.axes(self.reading.layouts[value] if layout is None else layout):
            return Carried(None)
        if self.reading.uniform[value]:
            return Carried(State.CONST)
        if self.reading.constant[value]:
            mine = self.reading.layouts[value]
            scales = all(self.places.volume.births.roles.get(key) == {SCALES} for key in self.places.slots_in(mine))
            state = State.ANY if scales and self.start is State.ZERO else self.start  # scales stay alive where writers are zero
            return Carried(state, writers=self.places.unscaled(mine))
        return Carried(State.CONST if not self.reading.layouts[value] else State.ANY)

    def copied_whole(self, layout: Layout, axes: frozenset[int]) -> None:
        """A statistic over copies stays if all that it goes over is copied, equally often; groups must hold the same units."""
        for block in layout:
            ids = self.places.ids(block.labels)
            others = [position for position, axis in enumerate(block.axes) if axis not in axes]
            if len(others) < ids.ndim and (ids < 0).any():
                raise Refused(f"{self.op.module or self.op.name} takes a statistic over it together with other units")
            if len(others) < ids.ndim and any((ids != ids.take([0], axis=position)).any() for position in others):
                raise Refused(f"{self.op.module or self.op.name} takes a statistic over groups that hold different units of it")
        self.verdict.multiples = True

    def mean_of(self, x: Carried, layout: Layout, axes: frozenset[int]) -> None:
        """The mean of the units at each place is not the mean over units and places together."""
        self.averaged(x)
        if axes - self.places.axes(layout):
            raise Refused(f"{self.op.module or self.op.name} takes a statistic over its units and over places at once")

    def require_unscaled(self, *items: Carried) -> None:
        if any(item.exponent for item in items):
            raise Refused(
                f"the scale of a norm over it is not taken up by a parameter before {self.op.name} ({self.op.module})"
            )

    def blend(self, items: Iterable[Carried]) -> Carried:
        """What holds for several values laid side by side or added."""
        present = list(items)
        factors = {(item.exponent, item.ratio) for item in present if item.state is not State.CONST}
        if len(factors) > 1:
            raise Refused(f"values of different scale meet in {self.op.name} ({self.op.module})")
        exponent, ratio = next(iter(factors), (Fraction(0), None))
        writers = frozenset[tuple[str, str]]().union(*(item.writers for item in present))
        states = {item.state for item in present} - {None}
        means = {item.mean for item in present}
        mean = means.pop() if len(means) == 1 else None
        standardised = any(item.standardised for item in present)
        return Carried(blended(states), exponent, ratio, mean, writers, standardised)

    def shifted(self, state: State | None, shifts: tuple[int, ...]) -> State | None:
        """Zeros to which something is added that is there for old and new units alike, as a bias along another axis is."""
        same = [value for value in shifts if self.carried(value).state is None and not self.reading.zeros[value]]
        return State.ANY if state is State.ZERO and same else state

    def all_zero(self, effect: Map) -> bool:
        """Whether all values that a function takes are zero at new units, and none is the same for all units."""
        values = [
            value for value in effect.inputs if self.reading.trace.values[value].floating and not self.reading.zeros[value]
        ]
        return all(self.carried(value).state is State.ZERO for value in values)

    def demand(self, key: tuple[str, int], what: str) -> None:
        now = self.verdict.readers.get(key, "free")
        self.verdict.readers[key] = max(now, what, key=STRICTNESS.index)

    def averaged(self, x: Carried) -> None:
        """A statistic relies on new units being the mean of what it sees: of rows after the scale that they have passed."""
        for writer, scale in x.writers:
            if self.verdict.weights.setdefault(writer, scale) != scale:
                raise Refused(f"{writer} reaches one statistic through {scale or 'no scale'} and another without it")

    def maker(self, value: int) -> Op | None:
        self.looked_up.makers.add(value)
        return self.places.anatomy.maker.get(value)

    def users(self, value: int) -> list[int]:
        self.looked_up.users.add(value)
        return self.places.anatomy.consumers.get(value, [])
