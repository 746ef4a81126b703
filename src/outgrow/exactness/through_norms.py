"""The state of new units after operators that mix units: statistics over units, norms, a softmax.

A mean over C units becomes C/C′ of its old value if the new units are zero: this factor is carried along (see
`exactness/propagate_states.py`).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from outgrow.analysis.effects import Mix, Normalise, Reduce
from outgrow.analysis.exponents import Exponent
from outgrow.analysis.unit_states import Carried, MoveEps, Ratio, Refused, State
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.compared_copies import POWERS, summed_copies
from outgrow.exactness.compensation import Compensation


class Norms:
    """The steps of a walk at statistics over units, and at norms."""

    def __init__(self, findings: Findings, compensation: Compensation) -> None:
        self.findings, self.places, self.reading, self.compensation = findings, findings.places, findings.reading, compensation

    def reduce(self, effect: Reduce) -> Carried:
        layout = self.reading.layouts[effect.input]
        x = self.findings.carried(effect.input)
        if not self.places.axes(layout) & effect.axes:
            if effect.how == "other":
                self.findings.require_unscaled(x)
            state = x.state
            if state is State.MEAN and effect.how not in ("sum", "mean"):
                state = State.ANY
            return Carried(state, x.exponent, x.ratio, writers=x.writers)
        if x.state is State.CONST:
            self.findings.require_unscaled(x)
            return Carried(None)
        if x.state is State.MEAN and effect.how == "mean":
            self.findings.mean_of(x, layout, effect.axes)
            self.places.ratio(layout, effect.axes, whole=True)
            return Carried(None, x.exponent, x.ratio, mean=effect.input)
        if x.state is State.ZERO and effect.how in ("sum", "norm"):
            return Carried(None, x.exponent, x.ratio)
        if x.state is State.ZERO and effect.how == "mean":
            return Carried(None, x.exponent + 1, self.places.ratio(layout, effect.axes, whole=True))
        if x.state is State.MEAN and effect.how in ("var", "std"):
            self.findings.mean_of(x, layout, effect.axes)
            power = Fraction(1) if effect.how == "var" else Fraction(1, 2)
            return Carried(None, (x.exponent * 2 + 1) * power, self.places.ratio(layout, effect.axes, whole=True))
        if x.state is State.COPY and effect.how == "extreme":
            return Carried(None, x.exponent, x.ratio)
        if x.state is State.COPY and effect.how in ("mean", "var", "std"):
            self.findings.copied_whole(layout, effect.axes)
            return Carried(None, x.exponent, x.ratio)
        if x.state is State.ANY and effect.how == "norm" and self.compensation.weights.normed(effect.input):
            return Carried(None)
        op, kind = self.findings.op, self.findings.start.value
        refusal = f"{op.name} runs over its units ({op.module or 'the model'}), and {kind} would change its result"
        if x.state is State.COPY and effect.how in POWERS:
            return summed_copies(self.findings, effect, x, refusal)
        raise Refused(refusal)

    def normalise(self, effect: Normalise) -> Carried:
        x = self.findings.carried(effect.input.value, effect.input.layout)
        if self.findings.equations is None or x.state is not State.MEAN:
            self.findings.require_unscaled(x)
        if not self.places.axes(effect.input.layout) & effect.axes:
            self.findings.require_unscaled(x)
            shifts = () if effect.beta is None else (effect.beta.value,)
            return Carried(State.ANY if x.state is State.MEAN else self.findings.shifted(x.state, shifts))
        place = self.findings.op.module or self.findings.op.name
        if self.reading.constant[effect.input.value] and self.compensation.weights.reads_with(self.findings.op.outputs[0]):
            return self.standardise(effect)
        if x.state is State.MEAN:
            self.findings.mean_of(x, effect.input.layout, effect.axes)
            ratio = self.places.ratio(effect.input.layout, effect.axes, whole=True)
            return self.normalised(effect, ratio) if self.findings.equations is None else self.paid_for(effect, x, ratio)
        if x.state is State.COPY:
            self.findings.copied_whole(effect.input.layout, effect.axes)
            return self.with_parameters(effect, Carried(State.COPY))
        raise Refused(f"the norm {place} takes its statistics over the units, which {self.findings.start.value} would change")

    def standardise(self, effect: Normalise) -> Carried:
        """Weight standardisation: a norm over a reader's columns.

        Pairs are read as mean ± A with A of the row's own variance, so mean and variance stay; columns for all other states
        are the mean itself, which becomes zero.
        """
        if self.findings.equations is not None:
            raise Refused(f"a weight that reads it is normalised over its columns in {self.findings.place}")
        source = self.compensation.weights.multiple_of(effect.input.value)
        if source is None or source[1] or effect.beta is not None:
            what = "a bias is added to it" if effect.beta is not None else "it is computed from stored tensors"
            place = self.findings.op.module or "the model"
            raise Refused(f"a weight that reads it is normalised over its columns in {place}, and {what}")
        columns = tuple(block for block in effect.input.layout if set(block.axes) & effect.axes)
        for key in self.places.slots_in(columns):
            self.findings.demand(key, "spread" if self.findings.start is State.PAIR else "mean")
        ratio = self.places.ratio(effect.input.layout, effect.axes, whole=False)
        if self.findings.start is State.PAIR:
            return Carried(State.PAIR, standardised=True)
        return replace(self.normalised(effect, ratio), standardised=True)

    def normalised(self, effect: Normalise, ratio: Ratio) -> Carried:
        """The result of a norm whose new entries equal the mean: they become zero, and the variance is multiplied by ratio."""
        self.findings.verdict.eps.append(
            MoveEps(self.findings.op.index, self.findings.op.module, effect.eps, ratio, Fraction(1))
        )
        result = Carried(State.ZERO, Exponent(Fraction(-1, 2)), ratio)
        return self.compensation.compensate(result, effect.gamma) if effect.gamma is not None else result

    def paid_for(self, effect: Normalise, x: Carried, ratio: Ratio) -> Carried:
        """The same where writers pay: the variance does not change, and neither does ε."""
        if effect.eps:
            self.findings.must_be_zero(x.exponent * 2 + 1, f"the ε of {self.findings.place} would have to change with its size")
        return self.with_parameters(effect, Carried(State.ZERO, Exponent(Fraction(-1, 2)), ratio))

    def with_parameters(self, effect: Normalise, x: Carried) -> Carried:
        """The result of a norm whose γ and β may be rescaled: normalised units, times γ, plus β."""
        if self.findings.equations is None:
            return x
        if effect.gamma is not None:
            x = replace(x, exponent=x.exponent + self.findings.carried(effect.gamma.value).exponent, ratio=self.findings.ratio)
        if effect.beta is not None:
            self.findings.blend([x, self.findings.carried(effect.beta.value)])
        return x

    def mix(self, effect: Mix) -> Carried:
        items = [self.findings.carried(side.value, side.layout) for side in effect.inputs]
        self.findings.require_unscaled(*items)
        if effect.shares and items[0].state is State.COPY and self.places.axes(effect.inputs[0].layout) & effect.axes:
            self.findings.copied_whole(effect.inputs[0].layout, effect.axes)
            ratio = self.places.ratio(effect.inputs[0].layout, effect.axes, whole=True)
            return Carried(State.COPY, Exponent(Fraction(1)), ratio)
        for side, item in zip(effect.inputs, items, strict=True):
            if self.places.axes(side.layout) & effect.axes and item.state is not State.CONST:
                raise Refused(f"{effect.reason} ({self.findings.op.module or 'the model'})")
        state = self.findings.blend(items).state
        return Carried(State.ANY if state in (State.MEAN, State.ZERO) else state)
