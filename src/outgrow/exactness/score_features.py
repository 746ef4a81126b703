"""Features of a head that q·kᵀ sums over: what new ones must hold, and which scale makes up for their number.

    s = a(D)·Σ over d of q[d]·k[d],    a(D) = D^(−e), usually 1/√D

New features of k are zero and those of q are drawn, so the sum stays, and both learn: k at once, q as soon as k is not zero. If
the code computes a(D) from the size of a head, the scores would shrink by (D/D′)^e; the existing rows of q are multiplied by
(D′/D)^e instead.

The rows are found from the two factors back to their weights, through views and constants. A rotary encoding turns pairs of
features, q[i]·cos − q[j]·sin; units are pairs there, and a pair that is zero stays zero. Anything else in between is refused.

A norm over queries and keys, γ·q/√(mean of q² + ε), keeps its statistics if all features are copied equally often. Then new
entries of the γ of k are zero, those of q are copies, and the whole γ of q makes up for the scale. This needs the rotary
encoding, which turns copies by other angles: without it, copies would stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from outgrow.analysis.effects import Contract, Map, Move, Operand, Scale, Sum
from outgrow.analysis.labels import Layout
from outgrow.analysis.roles import SCALES, weight_of
from outgrow.analysis.unit_states import Ratio, Refused, Rescale, Rows, ScoreFeatures, ScoreScalar
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.weight_sources import WeightSources
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op

MORE = "queries or keys pass through more than the γ of an RMS norm and a rotary encoding before they meet"
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

    def read_normed(self, effect: Contract, weights: WeightSources) -> None:
        """The same where a norm runs over queries and keys: copies of all units leave its statistics, and γ decides."""
        if any(self.reading.uniform[side.value] for side in (effect.left, effect.right)):
            raise Refused(f"a constant is multiplied with it and summed over it ({self.findings.place})")
        q, k = (self._gamma(side, weights) for side in (effect.left, effect.right))
        if q[0] == k[0]:
            raise Refused(f"queries and keys share the γ of their norm, {q[0]} ({self.findings.place})")
        ratio = self._ratio(effect.left, effect.contracted)
        scalars = tuple(self._scalars(effect, ratio.old))
        exponent = -sum((scalar.exponent for scalar in scalars), Fraction(0))
        rescale = Rescale(q[0], ratio, exponent, q[1])
        if exponent and rescale not in self.findings.verdict.rescales:
            self.findings.verdict.rescales.append(rescale)
        rows = tuple((tensor, axis, positions) for tensor, axis, positions in self._slots(k[0]))
        self.findings.verdict.scores.append(ScoreFeatures(self.findings.op.index, rows, (), ratio, scalars, k[1]))

    def _slots(self, tensor: str) -> Iterator[Rows]:
        for slot in self.places.volume.slots:
            if slot.tensor == tensor:
                yield slot.tensor, slot.axis, slot.positions

    def _gamma(self, side: Operand, weights: WeightSources) -> tuple[str, float]:
        """The tensor that multiplies all features of a factor behind its norm, and the constant added to it (as in 1 + w)."""
        found: set[tuple[str, float]] = set()
        todo = [side.value]
        while todo:
            op = self.findings.maker(todo.pop())
            match None if op is None else self.reading.effects[op.index]:
                case Move() as effect:
                    todo += [source for source in effect.inputs if self.places.carries(source)]
                case Scale() as effect:
                    todo.append(effect.input)
                case Sum() as effect:
                    todo += [one.value for one in effect.inputs]
                case Map() as effect if op is not None and base_name(op) == "neg":
                    todo += effect.inputs
                case Contract() as effect if not effect.contracted and not effect.divide:
                    sides = [one for one in (effect.left, effect.right) if not self._is_position(one.value)]
                    scales = [one for one in sides if self.reading.constant[one.value]]
                    source = weights.multiple_of(scales[0].value) if len(sides) == 2 and len(scales) == 1 else None
                    if source is not None and self._is_whole(source[0]):
                        found.add(source)
                    elif len(sides) == 1:
                        todo.append(sides[0].value)
                    else:
                        raise Refused(f"{MORE} ({self.findings.place})")
                case _:
                    raise Refused(f"{MORE} ({self.findings.place})")
        if len(found) != 1:
            raise Refused(f"{MORE} ({self.findings.place})")
        return found.pop()

    def _is_whole(self, tensor: str) -> bool:
        """Whether all entries of a tensor belong to the volume and scale its units."""
        slots = list(self._slots(tensor))
        shape = self.reading.trace.values[self.places.anatomy.held[tensor]].shape
        roles = {role for _, axis, _ in slots for role in self.places.volume.births.roles.get((tensor, axis), ())}
        return len(shape) == 1 and roles == {SCALES} and all(len(positions) == shape[0] for _, _, positions in slots)

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
        sides = [side]
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
                case Contract() if not effect.contracted and not effect.divide and self.places.volume.rotary:
                    sides.append(self._rotated(effect))
                    todo.append(sides[-1].value)
                case Map() if op is not None and base_name(op) == "neg" and self.places.volume.rotary:
                    todo += effect.inputs
                case Contract() if effect.contracted and (weight := weight_of(self.reading, effect)) is not None:
                    rows: Layout = tuple(b for b in weight.layout if not set(b.axes) & effect.contracted)
                    bias = self.reading.layouts[effect.bias] if effect.bias is not None else ()
                    groups.append([*self.places.slots_in(rows), *self.places.slots_in(bias)])
                case _:
                    raise Refused(f"queries or keys pass through more than a weight before they meet ({self.findings.place})")
        keys = list(dict.fromkeys(key for group in groups for key in group))
        wanted = np.unique(np.concatenate([block.labels.ravel() for one in sides for block in one.layout]))
        origins = [self.places.anatomy.origin[key] for key in keys]
        found = [wanted[(wanted >= o.start) & (wanted < o.start + o.size)] - o.start for o in origins]
        positions = next((tuple(one.tolist()) for one in found if len(one)), ())
        if len({origin.size for origin in origins}) != 1 or not positions:
            raise Refused(f"the rows that write queries or keys were not found ({self.findings.place})")
        for tensor, axis in keys:
            yield tensor, axis, positions

    def _rotated(self, effect: Contract) -> Operand:
        """Of a product with the sine or cosine of a rotary encoding, the other factor."""
        others = [side for side in (effect.left, effect.right) if not self._is_position(side.value)]
        if len(others) != 1:
            raise Refused(f"queries or keys are multiplied by more than a position encoding ({self.findings.place})")
        return others[0]

    def _is_position(self, value: int) -> bool:
        """Whether a value is the sine or cosine of angles, moved or multiplied by a constant."""
        op = self.findings.maker(value)
        match None if op is None else self.reading.effects[op.index]:
            case Map() if op is not None:
                return base_name(op) in ("sin", "cos")
            case Scale(input=source):
                return self._is_position(source)
            case Move(inputs=sources):
                return bool(sources) and all(map(self._is_position, sources))
        return False

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
