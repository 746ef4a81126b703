"""Follow new units along their path: what may a method write so that nothing changes downstream?

Every method brings new units into one *state*, and each operator between writers and readers maps states to states:

    PAIR   units come in twins with equal values               (R2R)
    COPY   each equals an old unit                             (Net2Net)
    ANY    nothing is known                                    (NetMorph with zero readers, random padding)
    ZERO   all are zero                                        (NetMorph with zero writers; under an RMS norm)
    MEAN   each equals the mean of the old units               (under a layer norm)

At a reader the state says what its new columns must be: PAIR → opposite signs, COPY → shared out, ANY and MEAN → zero,
ZERO → free. Where an operator lets units see each other (a norm, a softmax over them) most states stop: that is the refusal.

A statistic over C units of which the new ones are zero is C/C′ of what it was. Such a *debt* (C/C′)^e is carried along and
paid at the next parameter that multiplies (a norm's γ), with ε moved along: so a layer norm, an RMS norm written out with
pow, mean and rsqrt, and weight standardisation are one case.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from outgrow.alive import why_stuck
from outgrow.effects import (
    Contract,
    Effect,
    Folded,
    Fused,
    Ignore,
    Map,
    Mix,
    Move,
    Normalise,
    Operand,
    PerUnit,
    Power,
    Reduce,
    Scale,
    Shift,
    Sum,
)
from outgrow.kinds import Lookups
from outgrow.payments import Payments
from outgrow.reading import refs_in
from outgrow.roles import gauge_of, weight_of
from outgrow.states import READER, Carried, MoveEps, Ratio, Refused, State, Verdict, blended
from outgrow.volumes import Anatomy, Volume


def judge(anatomy: Anatomy, volume: Volume, state: State) -> Verdict:
    """Walk all operators that touch the volume, with its new units in the given state at the writers."""
    if volume.pinned:
        return Verdict(state, refusal=volume.pinned)
    return _judged(anatomy, volume, state)[0]


def _judged(anatomy: Anatomy, volume: Volume, state: State) -> tuple[Verdict, Lookups]:
    """A verdict, and what was looked up for it; in a block like one that was walked before, it is that one's, renamed."""
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
        walk.verdict.stuck = why_stuck(walk) if state in (State.ZERO, State.MEAN) else ""
    except Refused as refused:
        walk.verdict.refusal = str(refused)
    return walk.verdict, walk.looked_up


class Walk(Payments):
    """One pass over the operators that a volume touches."""

    def run(self) -> None:
        ops = self.reading.trace.ops
        todo = set(self.anatomy.ops_of[self.volume.name])
        order = sorted(todo)
        position = 0
        while position < len(order):
            index = order[position]
            position += 1
            self.op = ops[index]
            effect = self.reading.effects[index]
            if isinstance(effect, Fused):
                continue
            if isinstance(effect, Ignore):
                self.settled(*(self.known.get(ref.value, Carried(None)) for ref in refs_in((self.op.args, self.op.kwargs))))
                continue
            result = self.step(effect)
            for output in self.op.outputs:
                carries = self.axes(self.reading.layouts[output])
                if carries and result.state is None:
                    result = replace(result, state=State.CONST if self.reading.uniform[output] else State.ANY)
                known = result.debt or result.mean is not None
                if carries or known:
                    self.known[output] = result if carries else replace(result, state=None)
                if known and not carries:
                    late = [op for op in self.users(output) if op not in todo]
                    todo.update(late)
                    order[position:] = sorted({*order[position:], *late})
        for output in self.reading.trace.outputs:
            if self.known.get(output, Carried(None)).debt:
                raise Refused("the scale of a norm over it would reach the model's output")
        self._check_ties()
        self.check_payments()
        self.check_uses()

    def _check_ties(self) -> None:
        """A tensor that both writes and reads gets one value for both."""
        written = {(slot.tensor, slot.axis) for slot in self.volume.slots if slot.role == "writes"}
        for key, demand in self.verdict.readers.items():
            if demand in ("sign", "share") and "scales" in self.volume.births.roles.get(key, ()):
                raise Refused(f"{key[0]} both scales and reads it, and the two need different values")
            both = key in written and demand != "free"
            if both and not (demand == "zero" and self.start in (State.ZERO, State.ANY)):
                raise Refused(f"{key[0]} both writes and reads it (a tied parameter), and the two need different values")
        tied = written & set(self.verdict.readers)
        waiting = tied == written if self.start is State.ANY else tied == set(self.verdict.readers)
        if tied and waiting and self.start in (State.ZERO, State.ANY):
            self.verdict.stuck = f"{min(tied)[0]} both writes and reads it: were it zero on both sides, nothing would learn"

    def step(self, effect: Effect) -> Carried:
        match effect:
            case Move():
                return self.blend(self.carried(value) for value in effect.inputs)
            case Map():
                return self.map(self.blend(self.carried(value) for value in effect.inputs), effect)
            case Shift():
                return self.shift(self.carried(effect.input), effect.constant)
            case Power():
                return self.power(self.carried(effect.input), effect.exponent)
            case Scale():
                return self.carried(effect.input)
            case Sum():
                return self.sum(effect)
            case Contract():
                return self.contract(effect)
            case Reduce():
                return self.reduce(effect)
            case Normalise():
                return self.normalise(effect)
            case PerUnit():
                x = self.carried(effect.input)
                self.settled(x)
                return Carried(State.ANY if x.state is State.MEAN else x.state)
            case Mix():
                return self.mix(effect)
            case Folded():
                return self.folded(effect)
        raise AssertionError(effect)

    def map(self, x: Carried, effect: Map) -> Carried:
        if not effect.homogeneous:
            self.settled(x)
        state = x.state
        if state is State.MEAN or (state is State.ZERO and not effect.zero):
            state = State.ANY
        return Carried(state, x.debt, x.ratio)

    def shift(self, x: Carried, constant: float) -> Carried:
        if x.debt:
            if x.state is not None or x.ratio is None:
                raise Refused(f"a constant is added to a scaled value in {self.op.module}")
            self.verdict.eps.append(MoveEps(self.op.index, self.op.module, constant, x.ratio, x.debt))
            return x
        return replace(x, state=State.ANY) if x.state is State.ZERO else x

    def power(self, x: Carried, exponent: float) -> Carried:
        state = x.state
        if state is State.ZERO and exponent < 0:
            raise Refused(f"new units that are zero would be divided by in {self.op.module}")
        if state is State.MEAN and exponent != 1:
            state = State.ANY
        return Carried(state, x.debt * Fraction(exponent).limit_denominator(64), x.ratio)

    def sum(self, effect: Sum) -> Carried:
        sides = [side for side in effect.inputs if not self.reading.zeros[side.value]] or effect.inputs
        items = [self.carried(side.value, side.layout) for side in sides]
        carrying = [item for item in items if item.state is not None]
        if effect.minus and len(items) == 2 and items[0].state is State.MEAN and items[1].mean == effect.inputs[0].value:
            return Carried(State.ZERO)
        result = self.blend(items)
        if len(carrying) < len(items) and result.state is State.ZERO:
            return replace(result, state=State.ANY)
        return result

    def contract(self, effect: Contract) -> Carried:
        left, right = effect.left, effect.right
        a, b = self.carried(left.value, left.layout), self.carried(right.value, right.layout)
        axes = self.axes(left.layout) | self.axes(right.layout)
        if axes & effect.contracted:
            self.read(effect, a, b)
            result = self.written(effect)
        else:
            result = self.multiply(effect, a, b)
        if effect.bias is not None:
            bias = self.carried(effect.bias)
            if result.state is not None or bias.state is not None:
                result = self.blend([result, bias])
            else:
                self.settled(result)
        return result

    def read(self, effect: Contract, a: Carried, b: Carried) -> None:
        """The units are summed over: by a reader's columns, or by another activation."""
        constant = [self.reading.constant[side.value] for side in (effect.left, effect.right)]
        if not any(constant):
            if (a.state is State.ZERO) != (b.state is State.ZERO):  # were both zero, neither would get a gradient
                return
            raise Refused(f"two activations are multiplied and summed over it (as q·k is) in {self.op.module or self.op.name}")
        gauge = gauge_of(self.reading, effect)
        if gauge is not None:
            return self.measured(*((effect.right, b) if gauge is effect.left else (effect.left, a)))
        reader = weight_of(self.reading, effect)
        assert reader is not None
        data, x = (effect.left, a) if reader is effect.right else (effect.right, b)
        x = self.pay_at_reader(x, reader, effect.contracted)
        self.settled(x)
        state = x.state or (State.CONST if self.reading.uniform[data.value] else State.ANY)
        demand = (
            READER[state] if state is not State.CONST else {"share": "share", "sign": "sign"}.get(READER[self.start], "zero")
        )
        names = self.sources(reader.value, demand)
        self.read_at |= {(name, self.op.index) for name in names}
        done = self.known.get(reader.value)
        if done is not None and done.standardised:
            self.settled(done)
            if self.start is State.PAIR and x.state not in (State.PAIR, State.ZERO, State.CONST):
                raise Refused(f"new units are no longer pairs where the standardised weight of {self.op.module} reads them")
            return
        columns = tuple(block for block in reader.layout if set(block.axes) & effect.contracted)
        keys = self.slots_in(columns)
        for name in names - {tensor for tensor, _ in keys}:  # summands of the weight beside the one whose labels it carries
            mine = self.reading.layouts[self.anatomy.held[name]]
            keys |= {(name, block.axes[0]) for block in mine if self.axes((block,))}
        for key in keys:
            self.demand(key, demand)

    def written(self, effect: Contract) -> Carried:
        """What a product that reads the volume writes to it, if it does (a layer from the stream to the stream)."""
        rows = [
            (side, tuple(block for block in side.layout if not set(block.axes) & effect.contracted))
            for side in (effect.left, effect.right)
        ]
        sources = [(side, layout) for side, layout in rows if self.axes(layout)]
        if not sources:
            return Carried(None)
        if all(self.reading.constant[side.value] for side, _ in sources):
            return Carried(self.start, writers=self.unscaled(tuple(block for _, layout in sources for block in layout)))
        return Carried(State.ANY)

    def multiply(self, effect: Contract, a: Carried, b: Carried) -> Carried:
        """Products unit by unit, and products with something that carries no unit."""
        for mine, other, operand in ((a, b, effect.right), (b, a, effect.left)):
            if mine.debt and self.reading.constant[operand.value] and not other.debt and not effect.contracted:
                mine = self.pay(mine, operand)
                a, b = (mine, b) if operand is effect.right else (a, mine)
        sign = -1 if effect.divide else 1
        debt = a.debt + sign * b.debt
        ratio = a.ratio or b.ratio
        if State.CONST in (a.state, b.state) and not (effect.divide and a.state is State.CONST):
            return replace(b if a.state is State.CONST else a, debt=debt, ratio=ratio)
        if None in (a.state, b.state):
            state = a.state or b.state
            if effect.divide and a.state is None and state is State.ZERO:
                raise Refused(f"new units that are zero would be divided by in {self.op.module}")
            standardised = a.standardised or b.standardised
            return Carried(state, debt, ratio, writers=a.writers | b.writers, standardised=standardised)
        constant = [self.reading.constant[side.value] for side in (effect.left, effect.right)]
        x, scale = (a, effect.right) if constant[1] else (b, effect.left)
        if x.state is State.MEAN and constant[0] != constant[1] and not effect.contracted:
            return self.weigh(x, scale, debt, ratio)
        if effect.divide and b.state is State.ZERO and not constant[1]:
            raise Refused(f"new units that are zero would be divided by in {self.op.module}")
        if State.ZERO in (a.state, b.state):
            return Carried(State.ZERO, debt, ratio)
        state = blended({a.state, b.state})
        return Carried(State.ANY if state is State.MEAN else state, debt, ratio)

    def weigh(self, x: Carried, scale: Operand, debt: Fraction, ratio: Ratio | None) -> Carried:
        """LayerScale: rows must average to the mean after the scale, whose new entries are one."""
        names = self.origins(scale.layout)
        whole = sum(
            int((self.ids(block.labels) >= 0).sum()) == block.labels.size == self.volume.count for block in scale.layout
        )
        reads = any("reads" in self.volume.births.roles.get(key, ()) for key in self.slots_in(scale.layout))
        if len(names) != 1 or not whole or reads or not x.writers or any(passed for _, passed in x.writers):
            raise Refused(f"its writers are scaled one by one in {self.op.module}")
        scaled = frozenset((writer, next(iter(names))) for writer, _ in x.writers)
        return Carried(State.MEAN, debt, ratio, writers=scaled)

    def reduce(self, effect: Reduce) -> Carried:
        layout = self.reading.layouts[effect.input]
        x = self.carried(effect.input)
        if not self.axes(layout) & effect.axes:
            if effect.how == "other":
                self.settled(x)
            state = x.state
            if state is State.MEAN and effect.how not in ("sum", "mean"):
                state = State.ANY
            return Carried(state, x.debt, x.ratio, writers=x.writers)
        if x.state is State.CONST:
            return Carried(None)
        if x.state is State.MEAN and effect.how == "mean":
            self.mean_of(x, layout, effect.axes)
            self.ratio(layout, effect.axes, whole=True)
            return Carried(None, mean=effect.input)
        if x.state is State.ZERO and effect.how in ("sum", "norm"):
            return Carried(None, x.debt, x.ratio)
        if x.state is State.ZERO and effect.how == "mean":
            return Carried(None, x.debt + 1, self.ratio(layout, effect.axes, whole=True))
        if x.state is State.MEAN and effect.how in ("var", "std"):
            self.mean_of(x, layout, effect.axes)
            power = Fraction(1) if effect.how == "var" else Fraction(1, 2)
            return Carried(None, power, self.ratio(layout, effect.axes, whole=True))
        if x.state is State.COPY and effect.how == "extreme":
            return Carried(None, x.debt, x.ratio)
        if x.state is State.COPY and effect.how in ("mean", "var", "std"):
            self.copied_whole(layout, effect.axes)
            return Carried(None, x.debt, x.ratio)
        raise Refused(f"{self.op.name} over its units ({self.op.module or 'the model'}) does not keep {self.start.value} apart")

    def normalise(self, effect: Normalise) -> Carried:
        x = self.carried(effect.input.value, effect.input.layout)
        self.settled(x)
        if not self.axes(effect.input.layout) & effect.axes:
            return Carried(State.ANY if x.state is State.MEAN else x.state)
        place = self.op.module or self.op.name
        if self.reading.constant[effect.input.value]:
            return self.standardise(effect)
        if x.state is State.MEAN:
            self.mean_of(x, effect.input.layout, effect.axes)
            return self.normalised(effect, self.ratio(effect.input.layout, effect.axes, whole=True))
        if x.state is State.COPY:
            self.copied_whole(effect.input.layout, effect.axes)
            return Carried(State.COPY)
        raise Refused(f"the norm {place} takes its statistics over the units, which {self.start.value} would change")

    def standardise(self, effect: Normalise) -> Carried:
        """Weight standardisation: a norm over a reader's columns.

        Pairs are read as mean ± A with A of the row's own variance, so mean and variance stay; columns for anything else
        are the mean itself, which becomes zero.
        """
        columns = tuple(block for block in effect.input.layout if set(block.axes) & effect.axes)
        for key in self.slots_in(columns):
            self.demand(key, "spread" if self.start is State.PAIR else "mean")
        ratio = self.ratio(effect.input.layout, effect.axes, whole=False)
        if self.start is State.PAIR:
            return Carried(State.PAIR, standardised=True)
        return replace(self.normalised(effect, ratio), standardised=True)

    def normalised(self, effect: Normalise, ratio: Ratio) -> Carried:
        """New entries equal the mean, so they become zero; the variance is ratio times what it was."""
        self.verdict.eps.append(MoveEps(self.op.index, self.op.module, effect.eps, ratio, Fraction(1)))
        result = Carried(State.ZERO, Fraction(-1, 2), ratio)
        return self.pay(result, effect.gamma) if effect.gamma is not None else result

    def mix(self, effect: Mix) -> Carried:
        items = [self.carried(side.value, side.layout) for side in effect.inputs]
        self.settled(*items)
        if effect.shares and items[0].state is State.COPY and self.axes(effect.inputs[0].layout) & effect.axes:
            self.copied_whole(effect.inputs[0].layout, effect.axes)
            return Carried(State.COPY, Fraction(1), self.ratio(effect.inputs[0].layout, effect.axes, whole=True))
        for side, item in zip(effect.inputs, items, strict=True):
            if self.axes(side.layout) & effect.axes and item.state is not State.CONST:
                raise Refused(f"{effect.reason} ({self.op.module or 'the model'})")
        state = self.blend(items).state
        return Carried(State.ANY if state in (State.MEAN, State.ZERO) else state)

    def folded(self, effect: Folded) -> Carried:
        x = self.carried(effect.input)
        self.settled(x)
        if x.state not in (None, State.PAIR):
            raise Refused(f"the folded residual {self.op.module} goes on from pairs only (method='r2r')")
        writes = any(self.axes(self.reading.layouts[output]) for output in self.op.outputs)
        return Carried(State.ZERO if writes else None)
