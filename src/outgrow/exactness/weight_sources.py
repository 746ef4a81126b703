"""Weights that are computed from stored tensors: casts, masks, merged adapters, norms over their own entries.

Methods fill stored tensors. A reader's columns cancel only if the weight is a linear function of them, entry by entry, and if
nothing else is computed from them. Let w = f(v) be a weight's column for a new unit, computed from the stored column v:

    sign, share    f must be linear: w = s·v with one s for twins (or for a unit and its copies), and nothing added
    zero           f(0) = 0: a shift (a bias that does not grow, the β of a norm) would read the unit's arbitrary values
"""

from __future__ import annotations

from outgrow.analysis.effects import Contract, Map, Move, Normalise, Operand, Scale, Shift, Sum
from outgrow.analysis.roles import leader_of, weight_of
from outgrow.analysis.unit_states import Carried, Refused, State
from outgrow.exactness.carried_units import Findings


class WeightSources:
    """Follows readers' weights back to the stored tensors that they are computed from."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.places, self.reading = findings, findings.places, findings.reading
        self.passed: set[int] = set()  # operators that compute readers' weights from stored tensors
        self.unchanged: set[int] = set()  # operators that compute the same from weights with new columns
        self.read_at: set[tuple[str, int]] = set()  # tensors, and the operators where they read

    def read(self, weight: int, demand: str) -> set[str]:
        """Stored tensors whose columns read units at the current operator, as parts of a weight."""
        names = self.sources(weight, demand)
        self.read_at |= {(name, self.findings.op.index) for name in names}
        return names

    def sources(self, weight: int, demand: str) -> set[str]:
        """Stored tensors whose columns become those of a reader's weight; the operators in between are recorded."""
        names: set[str] = set()
        todo = [weight]
        while todo:
            value = todo.pop()
            name = self.reading.trace.values[value].name
            if name:
                names.add(name)
            elif (op := self.findings.maker(value)) is not None:
                self.passed.add(op.index)
                todo.extend(self._made_of(op.index, demand))
        return names

    def _made_of(self, index: int, demand: str) -> list[int]:
        """The inputs with units, if an operator's result is a linear function of them entry by entry."""
        op, effect = self.reading.trace.ops[index], self.reading.effects[index]
        match effect:
            case Move():
                return [value for value in effect.inputs if self.places.carries(value)]
            case Scale():
                return [effect.input]
            case Sum() if all(self.places.carries(side.value) for side in effect.inputs):
                return [side.value for side in effect.inputs]
            case Contract() if not any(self.places.axes(s.layout) & effect.contracted for s in (effect.left, effect.right)):
                return self._factors(effect, demand, op.module or "the model")
            case Normalise() if self.findings.known[op.outputs[0]].standardised:  # the columns are chosen to suit it
                return [effect.input.value]
            case Map(zero=True) if demand in ("free", "zero") and all(map(self.places.carries, effect.inputs)):
                return list(effect.inputs)
        raise Refused(f"a weight that reads it passes through {op.name} before it is used ({op.module or 'the model'})")

    def _factors(self, effect: Contract, demand: str, place: str) -> list[int]:
        """The inputs that a demand on a computed weight (a product) passes on to: one factor and the bias."""
        leader = leader_of(effect)
        sides = sorted((effect.left, effect.right), key=lambda side: side is not leader)
        carrying = [side for side in sides if self.places.carries(side.value)]
        alike = {"sign": State.PAIR, "share": State.COPY}.get(demand)
        for other in carrying[1:]:
            if alike is not None and self.findings.carried(other.value, other.layout).state not in (alike, State.CONST):
                raise Refused(f"a weight that reads it is a product whose second factor is no longer {alike.value} ({place})")
        if effect.divide and carrying[:1] == [effect.right]:
            raise Refused(f"a weight that reads it is a divisor ({place})")
        passed_on = [side.value for side in carrying[:1]]
        if effect.bias is None:
            return passed_on
        if demand != "free" and not (passed_on and self.places.carries(effect.bias)):
            raise Refused(f"a weight that reads it is added to a tensor that does not grow ({place})")
        return passed_on + [effect.bias] * self.places.carries(effect.bias)

    def reads_with(self, value: int) -> bool:
        """Whether a constant becomes a weight that reads the volume; if not, it is an activation that depends on no input."""
        todo = [value]
        while todo:
            value = todo.pop()
            for index in self.findings.users(value):
                effect = self.reading.effects[index]
                if isinstance(effect, Contract) and value in (effect.left.value, effect.right.value):
                    weight = weight_of(self.reading, effect)
                    if weight is not None and weight.value == value and self.places.axes(weight.layout) & effect.contracted:
                        return True
                outputs = self.reading.trace.ops[index].outputs
                if self.places.carries(value) and all(self.reading.constant[output] for output in outputs):
                    todo.extend(outputs)
        return False

    def multiple_of(self, value: int) -> tuple[str, float] | None:
        """The stored tensor that a value is a multiple of, and the constant added to it (as in 1 + w); or None."""
        offset = 0.0
        while not self.reading.trace.values[value].name:
            op = self.findings.maker(value)
            match None if op is None else self.reading.effects[op.index]:
                case Move(inputs=(source,)):
                    value = source
                case Scale(input=source) if not offset:
                    value = source
                case Shift(input=source, constant=constant) if not offset:
                    value, offset = source, constant
                case _:
                    return None
        return self.reading.trace.values[value].name, offset

    def check_uses(self) -> None:
        """Refuse other uses of tensors whose columns are chosen to suit a reader."""
        for tensor in {tensor for tensor, _ in self.findings.verdict.readers}:
            todo = [self.places.anatomy.held[tensor]]
            while todo:
                for index in self.findings.users(todo.pop()):
                    op = self.reading.trace.ops[index]
                    if (
                        (tensor, index) in self.read_at
                        or index in self.unchanged
                        or not all(self.reading.constant[output] for output in op.outputs)
                    ):
                        continue
                    if index not in self.passed and not isinstance(self.reading.effects[index], Move):
                        raise Refused(f"{op.name} computes with all of {tensor}, which reads it ({op.module or 'the model'})")
                    todo.extend(op.outputs)

    def normed(self, value: int) -> bool:
        """Handle a norm over the columns of a stored weight (weight normalisation, w = g·v/‖v‖): it stays if new ones are zero.

        Returns whether the new columns of v are zero: it only reads the volume, and new units hold any values.
        """
        source = self.multiple_of(value) if self.reading.constant[value] else None
        if source is None or source[1] or self.findings.start is not State.ANY:
            return False
        held = self.places.anatomy.held[source[0]]
        keys = self.places.slots_in(self.reading.layouts[held])
        roles = set().union(*(self.places.volume.births.roles.get(key, ()) for key in keys))
        if roles != {"reads"} or not self.reads_with(held):
            return False
        for key in keys:
            self.findings.demand(key, "zero")
        self.unchanged.add(self.findings.op.index)
        return True

    def measured(self, weight: Operand, w: Carried) -> None:
        """Handle a weight that buffers measure (a spectral norm): its new rows and columns must be zero.

        The buffers are updated from the weight while the model trains, so zeros in the buffers could not hide its new entries.
        """
        place = self.findings.op.module.partition(".parametrizations.")[0] or "the model"
        keys = self.places.slots_in(weight.layout)
        if all("writes" in self.places.volume.births.roles.get(key, ()) for key in keys):
            if w.state is not State.ZERO:
                raise Refused(
                    f"the spectral norm of {place} would change with the new rows of its weight, unless they are zero "
                    "(NetMorph(zero='writers'))"
                )
            return
        if self.findings.start is not State.ANY:
            raise Refused(
                f"the spectral norm of {place} would change with the new columns of its weight, unless they are zero "
                "(NetMorph()); with zero writers too, new units would never learn"
            )
        self.read(weight.value, "zero")
        for key in keys:
            self.findings.demand(key, "zero")
