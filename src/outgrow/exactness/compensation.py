"""Parameters that compensate a change of scale.

A statistic over units changes by a power of C/C′ (see `exactness/propagate_states.py`), and so does every product with it. The
next parameter that multiplies compensates this factor: the γ of a norm, entry by entry, or else the whole weight of a layer
that reads only such units.
"""

from __future__ import annotations

from dataclasses import replace

from outgrow.analysis.effects import Move, Operand, Scale, Shift
from outgrow.analysis.exponents import NONE
from outgrow.analysis.roles import WRITES
from outgrow.analysis.unit_states import Carried, Refused, Rescale
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.weight_sources import WeightSources


class Compensation:
    """Rescales parameters to compensate factors, and checks that this is right wherever they are used."""

    def __init__(self, findings: Findings, weights: WeightSources) -> None:
        self.findings, self.places, self.reading, self.weights = findings, findings.places, findings.reading, weights
        self.compensated: set[tuple[str, int]] = set()  # parameters that compensate a factor, each with the operator

    def compensate(self, x: Carried, operand: Operand) -> Carried:
        """Let a parameter that multiplies compensate the factor of a value."""
        source = self.weights.multiple_of(operand.value)
        if source is None or x.ratio is None:
            return x
        wanted = Rescale(source[0], x.ratio, -x.exponent.constant, source[1])
        self.compensated.add((wanted.tensor, self.findings.op.index))
        earlier = next((rescale for rescale in self.findings.verdict.rescales if rescale.tensor == wanted.tensor), None)
        if earlier is None:
            self.findings.verdict.rescales.append(wanted)
        elif earlier != wanted:
            raise Refused(f"{wanted.tensor} would have to be rescaled differently in two places that use it")
        return replace(x, exponent=NONE, ratio=None)

    def can_compensate(self, operand: Operand) -> bool:
        """Whether a factor is a constant that does not write the volume: a writer would change the norm's input."""
        roles = (self.places.volume.births.roles.get(key, {WRITES}) for key in self.places.slots_in(operand.layout))
        return self.reading.constant[operand.value] and not any(WRITES in found for found in roles)

    def check(self) -> None:
        """Check that a parameter which compensates a factor at one operator does so wherever it is used."""
        for tensor in {tensor for tensor, _ in self.compensated}:
            todo = [self.places.anatomy.held[tensor]]
            while todo:
                for index in self.findings.users(todo.pop()):
                    if (tensor, index) in self.compensated:
                        continue
                    op = self.reading.trace.ops[index]
                    multiple = isinstance(self.reading.effects[index], (Move, Scale, Shift))  # the ways of `multiple_of`
                    if not multiple or not all(self.reading.constant[output] for output in op.outputs):
                        user = op.module or "the model"
                        raise Refused(f"{tensor} would compensate the scale of a norm, but {user} uses it too")
                    todo.extend(op.outputs)

    def compensate_at_reader(self, x: Carried, reader: Operand, contracted: frozenset[int]) -> Carried:
        """Let a layer's weight compensate the factor of its input, if all its columns read these units."""
        columns = [block for block in reader.layout if set(block.axes) & contracted]
        if not x.exponent or not columns or any((self.places.ids(block.labels) < 0).any() for block in columns):
            return x
        source = self.weights.multiple_of(reader.value)
        return self.compensate(x, reader) if source is not None and not source[1] else x
