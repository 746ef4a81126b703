"""The state of new units after products: read by a weight, written by one, or scaled unit by unit."""

from __future__ import annotations

from dataclasses import replace

from outgrow.analysis.effects import Contract, Operand
from outgrow.analysis.exponents import NONE, Exponent
from outgrow.analysis.roles import measuring_side, weight_of
from outgrow.analysis.unit_states import READER, Carried, Ratio, Refused, State, blended
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.compared_copies import compared_copies
from outgrow.exactness.compensation import Compensation
from outgrow.exactness.score_features import ScoreProducts
from outgrow.exactness.tied_copies import extra_exponent, read_whole
from outgrow.exactness.weight_sources import WeightSources


class Products:
    """The steps of a walk at products; demands on readers are recorded in the verdict."""

    def __init__(self, findings: Findings, weights: WeightSources, compensation: Compensation) -> None:
        self.findings, self.places, self.reading = findings, findings.places, findings.reading
        self.weights, self.compensation = weights, compensation

    def contract(self, effect: Contract) -> Carried:
        left, right = effect.left, effect.right
        a, b = self.findings.carried(left.value, left.layout), self.findings.carried(right.value, right.layout)
        axes = self.places.axes(left.layout) | self.places.axes(right.layout)
        if axes & effect.contracted:
            extra = self.read(effect, a, b)
            result = self.written(effect)
            if self.findings.equations is not None:
                result = self.scaled(result, a.exponent + b.exponent + extra)
        else:
            result = self.multiply(effect, a, b)
        if effect.bias is not None:
            bias = self.findings.carried(effect.bias)
            if result.state is not None or bias.state is not None:
                result = self.findings.blend([result, bias])
                result = replace(result, state=self.findings.shifted(result.state, (effect.bias,)))
            else:
                self.findings.require_unscaled(result)
        return result

    def read(self, effect: Contract, a: Carried, b: Carried) -> Exponent:
        """A product that sums over the units: with a reader's columns, or with another activation.

        Returns the factor on its result where it sums over whole copies, as an exponent of C/C′.
        """
        constant = [self.reading.constant[side.value] for side in (effect.left, effect.right)]
        if not any(constant):
            if (a.state is State.ZERO) != (b.state is State.ZERO):  # if both were zero, neither would get a gradient
                return NONE
            if a.state is b.state is State.ANY:
                self.findings.require_unscaled(a, b)
                ScoreProducts(self.findings).read(effect)
                return NONE
            if a.state is b.state is State.COPY and self.places.volume.rotary and self.findings.verdict.multiples:
                self.findings.require_unscaled(a, b)
                ScoreProducts(self.findings).read_normed(effect, self.weights)
                return NONE
            place = self.findings.op.module or self.findings.op.name
            refusal = f"two activations are multiplied and summed over it (as q·k is) in {place}"
            return compared_copies(self.findings, effect, a, b, refusal)
        gauge = measuring_side(self.reading, effect)
        if gauge is not None:
            self.weights.measured(*((effect.right, b) if gauge is effect.left else (effect.left, a)))
            return NONE
        reader = weight_of(self.reading, effect)
        assert reader is not None
        data, x = (effect.left, a) if reader is effect.right else (effect.right, b)
        if self.findings.equations is None:
            x = self.compensation.compensate_at_reader(x, reader, effect.contracted)
            self.findings.require_unscaled(x)
        state = x.state or (State.CONST if self.reading.uniform[data.value] else State.ANY)
        demand = (
            READER[state]
            if state is not State.CONST
            else {"share": "share", "sign": "sign"}.get(READER[self.findings.start], "zero")
        )
        names = self.weights.read(reader.value, demand)
        done = self.findings.known.get(reader.value)
        if done is not None and done.standardised:
            self.findings.require_unscaled(done)
            if self.findings.start is State.PAIR and x.state not in (State.PAIR, State.ZERO, State.CONST):
                raise Refused(
                    f"new units are no longer pairs where the standardised weight of {self.findings.op.module} reads them"
                )
        columns = tuple(block for block in reader.layout if set(block.axes) & effect.contracted)
        keys = self.places.slots_in(columns)
        for name in names - {tensor for tensor, _ in keys}:  # summands of the weight other than the one whose labels it carries
            mine = self.reading.layouts[self.places.anatomy.held[name]]
            keys |= {(name, block.axes[0]) for block in mine if self.places.axes((block,))}
        whole = read_whole(self.findings, effect, reader, keys, x.state)
        for key in keys:
            self.findings.demand(key, "whole" if whole else demand)
        return extra_exponent(whole)

    def scaled(self, result: Carried, exponent: Exponent) -> Carried:
        """The result of a product that reads the volume, where writers pay: as a whole it keeps its scale, or writes."""
        if result.state is not None:
            return replace(result, exponent=exponent, ratio=self.findings.ratio)
        self.findings.must_be_zero(exponent, f"no parameter compensates the scale of what {self.findings.place} reads")
        return result

    def written(self, effect: Contract) -> Carried:
        """The result of a product that reads the volume and may also write it (a layer from the stream to the stream)."""
        rows = [
            (side, tuple(block for block in side.layout if not set(block.axes) & effect.contracted))
            for side in (effect.left, effect.right)
        ]
        sources = [(side, layout) for side, layout in rows if self.places.axes(layout)]
        if not sources:
            return Carried(None)
        if not all(self.reading.constant[side.value] for side, _ in sources):
            return Carried(State.ANY)
        made = [self.findings.known[side.value] for side, _ in sources if side.value in self.findings.known]
        states = {self._row_state(item) for item in made} | {self.findings.start}
        return Carried(blended(states), writers=self.places.unscaled(tuple(block for _, layout in sources for block in layout)))

    def _row_state(self, weight: Carried) -> State | None:
        """The state of a computed weight's rows; standardisation keeps all but the mean, and its own state is about columns."""
        if weight.standardised:
            return State.ANY if self.findings.start is State.MEAN else self.findings.start
        return weight.state

    def multiply(self, effect: Contract, a: Carried, b: Carried) -> Carried:
        """Products unit by unit, and products with values that carry no unit."""
        for mine, other, operand in ((a, b, effect.right), (b, a, effect.left)):
            if self.findings.equations is not None:
                break
            if mine.exponent and self.compensation.can_compensate(operand) and not other.exponent and not effect.contracted:
                mine = self.compensation.compensate(mine, operand)
                a, b = (mine, b) if operand is effect.right else (a, mine)
        sign = -1 if effect.divide else 1
        exponent = a.exponent + b.exponent * sign
        ratio = a.ratio or b.ratio
        if State.CONST in (a.state, b.state) and not (effect.divide and a.state is State.CONST):
            return replace(b if a.state is State.CONST else a, exponent=exponent, ratio=ratio)
        if None in (a.state, b.state):
            state = a.state or b.state
            if effect.divide and a.state is None and state is State.ZERO:
                raise Refused(f"{self.findings.place} would divide by new units that are zero")
            standardised = a.standardised or b.standardised
            return Carried(state, exponent, ratio, writers=a.writers | b.writers, standardised=standardised)
        constant = [self.reading.constant[side.value] for side in (effect.left, effect.right)]
        x, scale = (a, effect.right) if constant[1] else (b, effect.left)
        if x.state is State.MEAN and constant[0] != constant[1] and not effect.contracted:
            return self.weigh(x, scale, exponent, ratio)
        if effect.divide and b.state is State.ZERO and not constant[1]:
            raise Refused(f"{self.findings.place} would divide by new units that are zero")
        if State.ZERO in (a.state, b.state):
            return Carried(State.ZERO, exponent, ratio)
        state = blended({a.state, b.state})
        return Carried(State.ANY if state is State.MEAN else state, exponent, ratio)

    def weigh(self, x: Carried, scale: Operand, exponent: Exponent, ratio: Ratio | None) -> Carried:
        """LayerScale: rows must average to the mean after the scale, and new entries of the scale are one."""
        names = self.places.origins(scale.layout)
        whole = sum(
            int((self.places.ids(block.labels) >= 0).sum()) == block.labels.size == self.places.volume.count
            for block in scale.layout
        )
        reads = any("reads" in self.places.volume.births.roles.get(key, ()) for key in self.places.slots_in(scale.layout))
        if len(names) != 1 or not whole or reads or not x.writers or any(passed for _, passed in x.writers):
            raise Refused(f"{self.findings.place} scales its units in a way that does not keep their mean")
        scaled = frozenset((writer, next(iter(names))) for writer, _ in x.writers)
        return Carried(State.MEAN, exponent, ratio, writers=scaled)
