"""What a walk knows about each value of a trace: the state of a volume's new units, their scale, and their writers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outgrow.analysis.effects import Map, Move
from outgrow.analysis.exponents import NONE, Exponent
from outgrow.analysis.labels import Layout
from outgrow.analysis.repeated_blocks import Lookups
from outgrow.analysis.roles import READS, SCALES, WRITES
from outgrow.analysis.unit_states import STRICTNESS, Carried, Ratio, Refused, State, Verdict, blended
from outgrow.exactness.scale_equations import ScaleEquations
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.trace.operators import Op


class Findings:
    """The results of a walk so far, for one volume with its new units in one state at the writers."""

    def __init__(
        self,
        places: UnitPlaces,
        start: State,
        equations: ScaleEquations | None = None,
        tied: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        """equations: if given, what writes the volume pays, and exponents are found by these equations.

        tied: tensors and axes that write copies, and read them without sharing them out (see `exactness/tied_copies.py`).
        """
        self.places, self.start, self.reading, self.equations, self.tied = places, start, places.reading, equations, tied
        self.ratio = Ratio(places.volume.count, 1)  # of a statistic over the volume
        self.verdict = Verdict(start)
        self.known: dict[int, Carried] = {}
        self.looked_up = Lookups(states=self.known)
        self.op: Op = self.reading.trace.ops[0]  # the current operator

    @property
    def place(self) -> str:
        """The module of the current operator, for reasons of refusals."""
        return self.op.module or "the model"

    def carried(self, value: int, layout: Layout | None = None) -> Carried:
        """What is known about an operand; the walk starts at parameters."""
        if value in self.known:
            return self.known[value]
        exponent = self.own_exponent(value)
        if not self.places.axes(self.reading.layouts[value] if layout is None else layout):
            return Carried(None, exponent, self.ratio if exponent else None)
        if self.reading.uniform[value]:
            return Carried(State.CONST, scaleless=self.reading.zeros[value])
        if self.reading.constant[value]:
            mine = self.reading.layouts[value]
            scales = all(self.places.volume.births.roles.get(key) == {SCALES} for key in self.places.slots_in(mine))
            state = State.ANY if scales and self.start is State.ZERO else self.start  # where writers are zero, scales are not
            return Carried(state, exponent, self.ratio if exponent else None, writers=self.places.unscaled(mine))
        return Carried(State.CONST if not self.reading.layouts[value] else State.ANY)

    def copied_whole(self, layout: Layout, axes: frozenset[int]) -> None:
        """Check that a statistic over copies stays the same: all entries are copied equally often, in all groups alike."""
        for block in layout:
            ids = self.places.ids(block.labels)
            others = [position for position, axis in enumerate(block.axes) if axis not in axes]
            if len(others) < ids.ndim and (ids < 0).any():
                raise Refused(f"{self.op.module or self.op.name} computes a statistic over it together with other units")
            if len(others) < ids.ndim and any((ids != ids.take([0], axis=position)).any() for position in others):
                raise Refused(f"{self.op.module or self.op.name} computes a statistic over groups with different units of it")
        self.verdict.multiples = True

    def mean_of(self, x: Carried, layout: Layout, axes: frozenset[int]) -> None:
        """Check that a statistic runs over units only: the mean over units at each position is not the mean over both."""
        self.averaged(x)
        if axes - self.places.axes(layout):
            raise Refused(f"{self.op.module or self.op.name} computes one statistic over its units and over positions together")

    def require_unscaled(self, *items: Carried) -> None:
        """Refuse values whose scale changes with the volume's size, where the operator would not pass the factor on."""
        for item in items:
            self.must_be_zero(
                item.exponent,
                f"a norm or statistic over it changes scale with its size, and no parameter compensates that before "
                f"{self.op.name} ({self.place})",
            )

    def blend(self, items: Iterable[Carried]) -> Carried:
        """What is known about a sum or concatenation of values."""
        present = list(items)
        scaled = [item for item in present if not item.scaleless and (item.state is not State.CONST or self.equations)]
        factors = dict.fromkeys((item.exponent, item.ratio) for item in scaled)
        if len(factors) > 1:
            self._must_agree([exponent for exponent, _ in factors])
        exponent, ratio = next(iter(factors), (NONE, None))
        writers = frozenset[tuple[str, str]]().union(*(item.writers for item in present))
        states = {item.state for item in present} - {None}
        means = {item.mean for item in present}
        mean = means.pop() if len(means) == 1 else None
        standardised = any(item.standardised for item in present)
        return Carried(blended(states), exponent, ratio, mean, writers, standardised)

    def _must_agree(self, exponents: Sequence[Exponent]) -> None:
        """Refuse summands whose scales change differently."""
        reason = f"{self.op.name} ({self.place}) combines values whose scales change differently with its size"
        if self.equations is None:
            raise Refused(reason)
        for exponent in exponents[1:]:
            self.equations.must_be_zero(exponent - exponents[0], reason)

    def must_be_zero(self, exponent: Exponent, reason: str) -> None:
        """Refuse an exponent other than zero; where writers pay, find powers for which it is zero."""
        if self.equations is not None:
            self.equations.must_be_zero(exponent, reason)
        elif exponent:
            raise Refused(reason)

    def own_exponent(self, value: int) -> Exponent:
        """The exponent of a stored tensor, where writers pay."""
        if self.equations is None:
            return NONE
        name = self.reading.trace.values[value].name
        if not name or not self.places.carries(value):
            return Exponent(self.equations.computed(self._source(value)) or NONE.constant)
        return self.tensor_exponent(value, name)

    def tensor_exponent(self, value: int, name: str, offset: float = 0.0) -> Exponent:
        """The exponent of a stored tensor with units of the volume; zero if not all of it belongs to the volume."""
        assert self.equations is not None
        layout = self.reading.layouts[value]
        mixed = any((ids := self.places.ids(block.labels)).max() >= 0 > ids.min() for block in layout)
        roles = set().union(*(self.places.volume.births.roles.get(key, {WRITES}) for key in self.places.slots_in(layout)))
        rank = 0 if WRITES in roles else 2 if READS in roles else 1
        return NONE if mixed else self.equations.tensor(name, offset, rank)

    def _source(self, value: int) -> str:
        """The name of the stored tensor that a value is a cast or a view of; empty if it is computed."""
        while not (name := self.reading.trace.values[value].name):
            op = self.maker(value) if self.reading.constant[value] else None
            effect = None if op is None else self.reading.effects[op.index]
            if not isinstance(effect, Move) or len(effect.inputs) != 1:
                return ""
            (value,) = effect.inputs
        return name

    def shifted(self, state: State | None, shifts: tuple[int, ...]) -> State | None:
        """The state after a sum with values that do not grow: zeros plus a bias along another axis are not zero."""
        same = [value for value in shifts if self.carried(value).state is None and not self.reading.zeros[value]]
        return State.ANY if state is State.ZERO and same else state

    def all_zero(self, effect: Map) -> bool:
        """Whether all inputs of a function are zero at new units."""
        values = [
            value for value in effect.inputs if self.reading.trace.values[value].floating and not self.reading.zeros[value]
        ]
        return all(self.carried(value).state is State.ZERO for value in values)

    def demand(self, key: tuple[str, int], what: str) -> None:
        now = self.verdict.readers.get(key, "free")
        self.verdict.readers[key] = max(now, what, key=STRICTNESS.index)

    def averaged(self, x: Carried) -> None:
        """Record that a statistic needs new units to be the mean of the writers' rows, after the scale that the rows pass."""
        for writer, scale in x.writers:
            other = self.verdict.weights.setdefault(writer, scale)
            if other != scale:
                scales = f"{other or 'none'} and {scale or 'none'}"
                raise Refused(f"{writer} reaches two statistics through different scales ({scales})")

    def maker(self, value: int) -> Op | None:
        self.looked_up.makers.add(value)
        return self.places.anatomy.maker.get(value)

    def users(self, value: int) -> list[int]:
        self.looked_up.users.add(value)
        return self.places.anatomy.consumers.get(value, [])
