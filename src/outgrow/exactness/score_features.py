"""Features of a head that q·kᵀ sums over: what new ones must hold, and which scale makes up for their number.

    s = a(D)·Σ over d of q[d]·k[d],    a(D) = D^(−e), usually 1/√D

New features of k are zero and those of q are drawn, so the sum stays, and both learn: k at once, q as soon as k is not zero. If
the code computes a(D) from the size of a head, the scores would shrink by (D/D′)^e; the existing rows of q are multiplied by
(D′/D)^e instead.

The rows are found from the two factors back to their weights, through views and constants. Anything else in between, such as a
norm over queries, is refused by its own rule, or here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from outgrow.analysis.effects import Contract, Move, Operand, Scale, Sum
from outgrow.analysis.labels import Layout
from outgrow.analysis.roles import weight_of
from outgrow.analysis.unit_states import Ratio, Refused, Rows, ScoreFeatures, ScoreScalar
from outgrow.exactness.carried_units import Findings
from outgrow.trace.operators import Op

EXPONENTS = (Fraction(1, 2), Fraction(1, 4), Fraction(1))


class ScoreProducts:
    """The step of a walk at a product of two activations that sums over the volume's units."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.places, self.reading = findings, findings.places, findings.reading

    def read(self, effect: Contract) -> None:
        """Record the rows of k that must be zero, those of q that make up for the scale, and the scalars of the scale."""
        sides = effect.left, effect.right
        if any(self.reading.uniform[side.value] for side in sides):
            raise Refused(f"a constant is multiplied with it and summed over it ({self.findings.place})")
        q, k = (tuple(self._rows(side)) for side in sides)
        if any(one[:2] == other[:2] and not set(one[2]).isdisjoint(other[2]) for one in q for other in k):
            raise Refused(f"the rows of queries and keys are not separate weights ({self.findings.place})")
        ratio = self._ratio(effect.left, effect.contracted)
        scalars = tuple(self._scalars(effect, ratio.old))
        self.findings.verdict.scores.append(ScoreFeatures(self.findings.op.index, k, q, ratio, scalars))

    def _ratio(self, side: Operand, contracted: frozenset[int]) -> Ratio:
        (axis,) = contracted
        block = next(block for block in side.layout if axis in block.axes and self.places.axes((block,)))
        place = block.axes.index(axis)
        line = self.places.ids(block.labels)[tuple(slice(None) if p == place else 0 for p in range(block.labels.ndim))]
        if (line < 0).any():
            raise Refused(f"only a part of a head's features can grow, and the others set its scale ({self.findings.place})")
        return Ratio(len(line), int((line == self.places.volume.count - 1).sum()))

    def _rows(self, side: Operand) -> Iterator[Rows]:
        """Rows of weights and biases that write the units of a factor, as (tensor, axis, positions)."""
        wanted = np.unique(np.concatenate([np.zeros(0, np.int64), *(block.labels.ravel() for block in side.layout)]))
        groups: list[list[tuple[str, int]]] = []
        todo = [side.value]
        while todo:
            value = todo.pop()
            op = self.findings.maker(value)
            effect = None if op is None else self.reading.effects[op.index]
            match effect:
                case Move():
                    todo += [source for source in effect.inputs if self.places.carries(source)]
                case Scale():
                    todo.append(effect.input)
                case Sum():
                    carrying = [one for one in effect.inputs if self.places.axes(one.layout)]
                    constants = [one for one in carrying if self.reading.constant[one.value]]
                    groups.append([key for one in constants for key in self.places.slots_in(one.layout)])
                    todo += [one.value for one in carrying if one not in constants]
                case Contract() if effect.contracted and (weight := weight_of(self.reading, effect)) is not None:
                    rows: Layout = tuple(b for b in weight.layout if not set(b.axes) & effect.contracted)
                    bias = self.reading.layouts[effect.bias] if effect.bias is not None else ()
                    groups.append([*self.places.slots_in(rows), *self.places.slots_in(bias)])
                case _:
                    raise Refused(f"queries or keys pass through more than a weight before they meet ({self.findings.place})")
        keys = list(dict.fromkeys(key for group in groups for key in group))
        origins = [self.places.anatomy.origin[key] for key in keys]
        found = [wanted[(wanted >= o.start) & (wanted < o.start + o.size)] - o.start for o in origins]
        positions = next((tuple(one.tolist()) for one in found if len(one)), ())
        if len({origin.size for origin in origins}) != 1 or not positions:
            raise Refused(f"the rows that write queries or keys were not found ({self.findings.place})")
        for tensor, axis in keys:
            yield tensor, axis, positions

    def _scalars(self, effect: Contract, size: int) -> Iterator[ScoreScalar]:
        """Scalars between the weights and the scores, and behind the product, that are powers of the size of a head."""
        for side in (effect.left, effect.right):
            value: int | None = side.value
            while value is not None:
                op = self.findings.maker(value)
                step = None if op is None else self.reading.effects[op.index]
                if op is not None and isinstance(step, Scale):
                    yield from _power(op, size)
                value = step.input if isinstance(step, Scale) else step.inputs[0] if isinstance(step, Move) else None
        todo = list(self.findings.op.outputs)
        while todo:
            for index in self.findings.users(todo.pop()):
                op, step = self.reading.trace.ops[index], self.reading.effects[index]
                if isinstance(step, Scale):
                    yield from _power(op, size)
                if isinstance(step, (Scale, Move)):
                    todo += op.outputs


def _power(op: Op, size: int) -> Iterator[ScoreScalar]:
    """The operator, if it multiplies with size^(−e), or divides by size^e, for a usual e."""
    number = next((arg for arg in op.args if isinstance(arg, (int, float))), None)
    if number is None or size < 2:
        return
    divides = op.name.removesuffix("_") == "aten.div"
    for exponent in EXPONENTS:
        if math.isclose(float(number), size ** float(exponent if divides else -exponent), rel_tol=1e-6):
            yield ScoreScalar(op.index, float(number), exponent, divides)
            return
