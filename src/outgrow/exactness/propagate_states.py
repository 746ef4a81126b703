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
from outgrow.exactness.compared_copies import Summed
from outgrow.exactness.compensation import Compensation
from outgrow.exactness.scale_equations import Payment, ScaleEquations
from outgrow.exactness.stuck_at_zero import why_stuck
from outgrow.exactness.through_norms import Norms
from outgrow.exactness.through_products import Products
from outgrow.exactness.tied_copies import TiedReader, parameters_only, written_by
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.exactness.weight_sources import WeightSources
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import refs_in


def judge(anatomy: Anatomy, volume: Volume, state: State, payment: Payment | None = None) -> Verdict:
    """The verdict on a state: visit all operators that touch the volume, with its new units in this state at the writers.

    payment: if given, no ε changes, and what writes the volume is rescaled (see `exactness/scale_equations.py`).
    """
    if volume.pinned:
        return Verdict(state, refusal=volume.pinned)
    if payment is None:
        return _judged(anatomy, volume, state)[0]
    key = volume.name, f"{state.name} {payment}"
    if key not in anatomy.verdicts:
        anatomy.verdicts[key] = _walked(anatomy, volume, state, payment)
    verdict: Verdict = anatomy.verdicts[key][0]
    return verdict


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


def _walked(
    anatomy: Anatomy, volume: Volume, state: State, payment: Payment | None = None, tied: bool = False
) -> tuple[Verdict, Lookups]:
    """tied: a tensor that writes copies may read them whole (see `exactness/tied_copies.py`)."""
    walk = Walk(anatomy, volume, state, payment, tied)
    try:
        walk.run()
        walk.findings.verdict.stuck = why_stuck(walk.findings) if state in (State.ZERO, State.MEAN) else ""
    except (TiedReader, Summed) as refused:
        walk.findings.verdict.refusal = str(refused)
        if state is State.COPY and payment is None:
            again = _walked(anatomy, volume, state, parameters_only(anatomy), tied=True)
            return again if not again[0].refusal else (walk.findings.verdict, walk.findings.looked_up)
    except Refused as refused:
        walk.findings.verdict.refusal = str(refused)
    return walk.findings.verdict, walk.findings.looked_up


class Walk:
    """One pass over the operators that a volume touches, with its new units in one state at the writers."""

    def __init__(
        self, anatomy: Anatomy, volume: Volume, start: State, payment: Payment | None = None, tied: bool = False
    ) -> None:
        self.places = UnitPlaces(anatomy, volume)
        self.reading = anatomy.reading
        self.equations = None if payment is None else ScaleEquations(payment)
        self.findings = Findings(self.places, start, self.equations, written_by(volume) if tied else frozenset())
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
                self.findings.require_unscaled(*(self._carried(ref.value) for ref in taken))
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
            self.findings.must_be_zero(
                self.findings.known.get(output, Carried(None)).exponent,
                "a norm over it changes scale with its size, and no parameter before the model's output compensates it",
            )
        if self.equations is not None:
            self.findings.verdict.rescales = self.equations.rescales(self.findings.ratio)
            self.findings.verdict.scalars, self.findings.verdict.paid = self.equations.scalars(), not self.findings.tied
        self._check_ties()
        self.compensation.check()
        self.weights.check_uses()

    def _carried(self, value: int) -> Carried:
        """What is known about an operand that no unit passes through; where writers pay, stored tensors have a scale."""
        if self.equations is None or not self.reading.trace.values[value].floating:
            return self.findings.known.get(value, Carried(None))
        return self.findings.carried(value)

    def _check_ties(self) -> None:
        """Refuse a tensor that both writes and reads, or scales and reads, if the two need different values."""
        written = written_by(self.places.volume)
        for key, demand in self.findings.verdict.readers.items():
            if demand in ("sign", "share") and "scales" in self.places.volume.births.roles.get(key, ()):
                raise Refused(f"{key[0]} both scales and reads it, and the two need different values")
            both = key in written and demand not in ("free", "whole")
            if both and not (demand == "zero" and self.findings.start in (State.ZERO, State.ANY)):
                raise TiedReader(f"{key[0]} both writes and reads it (a tied parameter), and the two need different values")
        readers, start = set(self.findings.verdict.readers), self.findings.start
        tied = written & readers
        waiting = tied == written if start is State.ANY else tied == readers
        if tied and waiting and start in (State.ZERO, State.ANY):
            reason = "both writes and reads it: if it were zero on both sides, nothing would learn"
            self.findings.verdict.stuck = f"{min(tied)[0]} {reason}"

    def move(self, effect: Move) -> Carried:
        result = self.findings.blend(self.findings.carried(value) for value in effect.inputs)
        return replace(result, state=State.CONST) if effect.repeats and result.state is None else result

    def scale(self, effect: Scale) -> Carried:
        x = self.findings.carried(effect.input)
        power = None if self.equations is None else self.equations.scalar(self.findings.op.index)
        if not power:
            return x
        divides = base_name(self.findings.op) == "div"
        return replace(x, exponent=x.exponent + (-power if divides else power), ratio=self.findings.ratio)

    def per_unit(self, effect: PerUnit) -> Carried:
        x = self.findings.carried(effect.input)
        self.findings.require_unscaled(x)
        return Carried(State.ANY if x.state is State.MEAN else self.findings.shifted(x.state, effect.shifts))

    def map(self, effect: Map) -> Carried:
        boolean = {value: self.reading.trace.values[value].boolean for value in effect.inputs}
        x = self.findings.blend(replace(self.findings.carried(value), scaleless=boolean[value]) for value in effect.inputs)
        if not effect.homogeneous:
            self.findings.require_unscaled(x)
        state = x.state
        if state is State.MEAN or (state is State.ZERO and not (effect.zero and self.findings.all_zero(effect))):
            state = State.ANY
        return Carried(state, x.exponent, x.ratio)

    def shift(self, effect: Shift) -> Carried:
        x = self.findings.carried(effect.input)
        if self.equations is not None:
            return self._shifted(effect, x)
        if x.exponent:
            if x.state is not None or x.ratio is None:
                raise Refused(f"{self.findings.place} adds a constant to values whose scale changes with its size")
            op = self.findings.op
            self.findings.verdict.eps.append(MoveEps(op.index, op.module, effect.constant, x.ratio, x.exponent.constant))
            return x
        return replace(x, state=State.ANY) if x.state is State.ZERO else x

    def _shifted(self, effect: Shift, x: Carried) -> Carried:
        """x + c where writers pay: a tensor to which a constant is added is rescaled as a whole, and other values stay."""
        source = self.weights.multiple_of(self.findings.op.outputs[0]) if self.reading.constant[effect.input] else None
        state = State.ANY if x.state is State.ZERO else x.state
        if source is not None and self.places.carries(self.places.anatomy.held[source[0]]):
            value = self.places.anatomy.held[source[0]]
            return replace(x, state=state, exponent=self.findings.tensor_exponent(value, *source), ratio=self.findings.ratio)
        self.findings.must_be_zero(x.exponent, f"the ε of {self.findings.place} would have to change with its size")
        return replace(x, state=state)

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
            return replace(self.findings.blend(items), state=State.ZERO, mean=None)
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
