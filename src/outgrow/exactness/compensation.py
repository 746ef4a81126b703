"""Debts, and the parameters that pay them.

A statistic over units scales what it is multiplied with by a power of C/C′ (see `exactness/propagate_states.py`). The next
parameter that multiplies takes this up: the γ of a norm, entry by entry, or else the whole weight of a layer that reads nothing
but such units.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from outgrow.analysis.effects import Move, Operand, Scale, Shift
from outgrow.analysis.roles import WRITES
from outgrow.analysis.unit_states import Carried, Refused, Rescale
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.weight_sources import WeightSources


class Compensation:
    """Lets parameters take up factors, and checks that they do so wherever they are used."""

    def __init__(self, findings: Findings, weights: WeightSources) -> None:
        self.findings, self.places, self.reading, self.weights = findings, findings.places, findings.reading, weights
        self.compensated: set[tuple[str, int]] = set()  # parameters that took up a exponent, and at which operator

    def compensate(self, x: Carried, operand: Operand) -> Carried:
        """Let a parameter that multiplies take up the exponent."""
        source = self.weights.multiple_of(operand.value)
        if source is None or x.ratio is None:
            return x
        rescale = Rescale(source[0], x.ratio, -x.exponent, source[1])
        self.compensated.add((rescale.tensor, self.findings.op.index))
        earlier = next((known for known in self.findings.verdict.rescales if known.tensor == rescale.tensor), None)
        if earlier is None:
            self.findings.verdict.rescales.append(rescale)
        elif earlier != rescale:
            raise Refused(f"{rescale.tensor} is used in two places that need different scales of it")
        return replace(x, exponent=Fraction(0), ratio=None)

    def can_compensate(self, operand: Operand) -> bool:
        """Whether a factor is a constant that does not write the volume: a writer would change what the norm sees."""
        roles = (self.places.volume.births.roles.get(key, {WRITES}) for key in self.places.slots_in(operand.layout))
        return self.reading.constant[operand.value] and not any(WRITES in found for found in roles)

    def check(self) -> None:
        """A parameter that takes up a exponent at one operator must do so wherever it is used."""
        for tensor in {tensor for tensor, _ in self.compensated}:
            todo = [self.places.anatomy.held[tensor]]
            while todo:
                for index in self.findings.users(todo.pop()):
                    if (tensor, index) in self.compensated:
                        continue
                    op = self.reading.trace.ops[index]
                    multiple = isinstance(self.reading.effects[index], (Move, Scale, Shift))  # the ways of `multiple_of`
                    if not multiple or not all(self.reading.constant[output] for output in op.outputs):
                        raise Refused(f"{tensor} would take up the scale of a norm, but is used elsewhere too ({op.module})")
                    todo.extend(op.outputs)

    def compensate_at_reader(self, x: Carried, reader: Operand, contracted: frozenset[int]) -> Carried:
        """Let a layer's weight take up the exponent of what it reads, if all its columns read these units."""
        columns = [block for block in reader.layout if set(block.axes) & contracted]
        if not x.exponent or not columns or any((self.places.ids(block.labels) < 0).any() for block in columns):
            return x
        source = self.weights.multiple_of(reader.value)
        return self.compensate(x, reader) if source is not None and not source[1] else x
