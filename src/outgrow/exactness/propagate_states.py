"""Follow new units along their path: which values may a method write so that nothing changes downstream?

Every method puts new units into one *state*, and each operator between writers and readers maps states to states:

    PAIR   units come in twins with equal values               (R2R)
    COPY   each equals an old unit                             (Net2Net)
    ANY    arbitrary values                                    (NetMorph with zero readers, random padding)
    ZERO   all are zero                                        (NetMorph with zero writers; under an RMS norm)
    MEAN   each equals the mean of the old units               (under a layer norm)

At a reader the state decides its new columns: PAIR → opposite signs, COPY → shared out, ANY and MEAN → zero, ZERO → free.
Through an operator that mixes units (a norm, a softmax over them) most states are not exact: the method is refused.

A mean over C units becomes C/C′ of its old value if the new units are zero. Such a factor (C/C′)^e is carried along with the
values (`Carried.ratio`, `Carried.exponent`) and compensated at the next parameter that multiplies (a norm's γ); ε is rescaled
accordingly. So a layer norm, an RMS norm written with pow, mean and rsqrt, and weight standardisation are one case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from outgrow.analysis.effects import (
    Contract,
    Effect,
    Folded,
    Fused,
    Ignore,
    Map,
    Mix,
    Move,
    Normalise,
    PerUnit,
    Power,
    Reduce,
    Scale,
    Shift,
    Sum,
)
from outgrow.analysis.repeated_blocks import Lookups
from outgrow.analysis.unit_states import Carried, MoveEps, Refused, State, Verdict
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.compensation import Compensation
from outgrow.exactness.stuck_at_zero import why_stuck
from outgrow.exactness.through_norms import Norms
from outgrow.exactness.through_products import Products
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.exactness.weight_sources import WeightSources
from outgrow.trace.operators import refs_in


def judge(anatomy: Anatomy, volume: Volume, state: State) -> Verdict:
    """The verdict on a state: visit all operators that touch the volume, with its new units in this state at the writers."""
    if volume.pinned:
        return Verdict(state, refusal=volume.pinned)
    return _judged(anatomy, volume, state)[0]


def _judged(anatomy: Anatomy, volume: Volume, state: State) -> tuple[Verdict, Lookups]:
    """A verdict and its lookups; in a block equal to an earlier one, the earlier verdict with names replaced."""
    key = volume.name, state.name
    if key not in anatomy.verdicts:
        like = anatomy.kinds.like(volume)
        verdict, looked_up = (None, None) if like is None else _judged(anatomy, like.volume, state)
        if like is not None and verdict is not None and looked_up is not None and like.holds(looked_up):
            anatomy.verdicts[key] = like.verdict(verdict), looked_up
        else:
            anatomy.verdicts[key] = _walked(anatomy, volume, state)
    found: tuple[Verdict, Lookups] = anatomy.verdicts[key]
    return found


def _walked(anatomy: Anatomy, volume: Volume, state: State) -> tuple[Verdict, Lookups]:
    walk = Walk(anatomy, volume, state)
    try:
        walk.run()
        walk.findings.verdict.stuck = why_stuck(walk.findings) if state in (State.ZERO, State.MEAN) else ""
    except Refused as refused:
        walk.findings.verdict.refusal = str(refused)
    return walk.findings.verdict, walk.findings.looked_up


class Walk:
    """One pass over the operators that a volume touches, with its new units in one state at the writers."""

    def __init__(self, anatomy: Anatomy, volume: Volume, start: State) -> None:
        self.places = UnitPlaces(anatomy, volume)
        self.reading = anatomy.reading
        self.findings = Findings(self.places, start)
        self.weights = WeightSources(self.findings)
        self.compensation = Compensation(self.findings, self.weights)
        products = Products(self.findings, self.weights, self.compensation)
        norms = Norms(self.findings, self.compensation)
        self.steps: Mapping[type[Effect], Callable[[Any], Carried]] = {
            Move: self.move,
            Map: self.map,
            Shift: self.shift,
            Power: self.power,
            Scale: self.scale,
            Sum: self.sum,
            PerUnit: self.per_unit,
            Folded: self.folded,
            Contract: products.contract,
            Reduce: norms.reduce,
            Normalise: norms.normalise,
            Mix: norms.mix,
        }

    def run(self) -> None:
        """Visit the operators in order; users of a statistic over the units are added when it is found."""
        todo = set(self.places.anatomy.ops_of[self.places.volume.name])
        order = sorted(todo)
        position = 0
        while position < len(order):
            index = order[position]
            position += 1
            self.findings.op = op = self.reading.trace.ops[index]
            effect = self.reading.effects[index]
            if isinstance(effect, Fused):
                continue
            if isinstance(effect, Ignore):
                taken = refs_in((op.args, op.kwargs))
                self.findings.require_unscaled(*(self.findings.known.get(ref.value, Carried(None)) for ref in taken))
                continue
            result = self.steps[type(effect)](effect)
            for output in op.outputs:
                carries = self.places.axes(self.reading.layouts[output])
                if carries and result.state is None:
                    result = replace(result, state=State.CONST if self.reading.uniform[output] else State.ANY)
                known = result.exponent or result.mean is not None
                if carries or known:
                    self.findings.known[output] = result if carries else replace(result, state=None)
                if known and not carries:
                    late = [user for user in self.findings.users(output) if user not in todo]
                    todo.update(late)
                    order[position:] = sorted({*order[position:], *late})
        for output in self.reading.trace.outputs:
            if self.findings.known.get(output, Carried(None)).exponent:
                raise Refused(
                    "a norm over it changes scale with its size, and no parameter before the model's output compensates it"
                )
        self._check_ties()
        self.compensation.check()
        self.weights.check_uses()

    def _check_ties(self) -> None:
        """Refuse a tensor that both writes and reads, or scales and reads, if the two need different values."""
        written = {(slot.tensor, slot.axis) for slot in self.places.volume.slots if slot.role == "writes"}
        for key, demand in self.findings.verdict.readers.items():
            if demand in ("sign", "share") and "scales" in self.places.volume.births.roles.get(key, ()):
                raise Refused(f"{key[0]} both scales and reads it, and the two need different values")
            both = key in written and demand != "free"
            if both and not (demand == "zero" and self.findings.start in (State.ZERO, State.ANY)):
                raise Refused(f"{key[0]} both writes and reads it (a tied parameter), and the two need different values")
        readers, start = set(self.findings.verdict.readers), self.findings.start
        tied = written & readers
        waiting = tied == written if start is State.ANY else tied == readers
        if tied and waiting and start in (State.ZERO, State.ANY):
            reason = "both writes and reads it: if it were zero on both sides, nothing would learn"
            self.findings.verdict.stuck = f"{min(tied)[0]} {reason}"

    def move(self, effect: Move) -> Carried:
        return self.findings.blend(self.findings.carried(value) for value in effect.inputs)

    def scale(self, effect: Scale) -> Carried:
        return self.findings.carried(effect.input)

    def per_unit(self, effect: PerUnit) -> Carried:
        x = self.findings.carried(effect.input)
        self.findings.require_unscaled(x)
        return Carried(State.ANY if x.state is State.MEAN else self.findings.shifted(x.state, effect.shifts))

    def map(self, effect: Map) -> Carried:
        x = self.findings.blend(self.findings.carried(value) for value in effect.inputs)
        if not effect.homogeneous:
            self.findings.require_unscaled(x)
        state = x.state
        if state is State.MEAN or (state is State.ZERO and not (effect.zero and self.findings.all_zero(effect))):
            state = State.ANY
        return Carried(state, x.exponent, x.ratio)

    def shift(self, effect: Shift) -> Carried:
        x = self.findings.carried(effect.input)
        if x.exponent:
            if x.state is not None or x.ratio is None:
                raise Refused(f"{self.findings.place} adds a constant to values whose scale changes with its size")
            op = self.findings.op
            self.findings.verdict.eps.append(MoveEps(op.index, op.module, effect.constant, x.ratio, x.exponent))
            return x
        return replace(x, state=State.ANY) if x.state is State.ZERO else x

    def power(self, effect: Power) -> Carried:
        x, exponent = self.findings.carried(effect.input), effect.exponent
        state = x.state
        if state is State.ZERO and exponent < 0:
            raise Refused(f"{self.findings.place} would divide by new units that are zero")
        if state is State.MEAN and exponent != 1:
            state = State.ANY
        return Carried(state, x.exponent * Fraction(exponent).limit_denominator(64), x.ratio)

    def sum(self, effect: Sum) -> Carried:
        sides = [side for side in effect.inputs if not self.reading.zeros[side.value]] or effect.inputs
        items = [self.findings.carried(side.value, side.layout) for side in sides]
        carrying = [item for item in items if item.state is not None]
        if effect.minus and len(items) == 2 and items[0].state is State.MEAN and items[1].mean == effect.inputs[0].value:
            return Carried(State.ZERO)
        result = self.findings.blend(items)
        if len(carrying) < len(items) and result.state is State.ZERO:
            return replace(result, state=State.ANY)
        return result

    def folded(self, effect: Folded) -> Carried:
        """A skip between volumes of different sizes: `modules/fold.py` says what it does with each state."""
        x = self.findings.carried(effect.input)
        self.findings.require_unscaled(x)
        self.findings.verdict.folded = True
        writes = any(self.places.axes(self.reading.layouts[output]) for output in self.findings.op.outputs)
        return Carried((State.COPY if self.findings.start is State.COPY else State.ZERO) if writes else None)
