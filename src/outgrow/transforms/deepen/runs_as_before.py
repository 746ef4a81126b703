"""Check that a model with one more block runs everything else as before, by comparing two traces without values.

A model's code may do more with its blocks than run them: divide by their number, index a table by their position. If so, some
operator outside the new block differs. Otherwise the operators are those of the model before, one by one, with the same scalar
arguments, and with the output of the new block in place of its input. A new block that is the identity then changes nothing.
"""

from __future__ import annotations

from typing import Any

from outgrow.growth_plan.plan import Plan
from outgrow.trace.operators import Op, Ref, Trace


def runs_as_before(before: Trace, after: Trace, plan: Plan) -> bool:
    """Whether this is certain. plan: the plan that inserted one new block. Both traces begin with a pass in the same mode."""
    return len(plan.new_blocks) == 1 and _Comparison(before, after, plan).same()


def within(op: Op, path: str) -> bool:
    """Whether an operator ran inside a module."""
    return op.module == path or op.module.startswith(f"{path}.")


class _Comparison:
    """Matches the values of two traces, beginning with parameters and inputs."""

    def __init__(self, before: Trace, after: Trace, plan: Plan) -> None:
        self.before, self.after = before, after
        (self.block,) = plan.new_blocks
        named = {plan.renamed(value.name): value.index for value in before.values if value.name}
        inputs = [[value.index for value in trace.values if value.kind == "input"] for trace in (before, after)]
        self.pairs = {value.index: named[value.name] for value in after.values if value.name in named}
        self.pairs.update(zip(inputs[1], inputs[0], strict=False))
        self.even = len(inputs[0]) == len(inputs[1])
        self.exits: dict[int, int] = {}  # values that the new block makes, and others use

    def same(self) -> bool:
        old, new = (trace.ops[: trace.ends[0]] for trace in (self.before, self.after))
        inside = [op for op in new if within(op, self.block)]
        outside = [op for op in new if not within(op, self.block)]
        self.made = {output for op in inside for output in op.outputs}
        if not self.even or not inside or len(outside) != len(old):
            return False
        return (
            all(self._alike(*pair) for pair in zip(old, outside, strict=True))
            and self._outputs(len(old))
            and self._passed_on(inside)
        )

    def _alike(self, old: Op, new: Op) -> bool:
        if old.name != new.name or old.kwargs.keys() != new.kwargs.keys() or len(old.outputs) != len(new.outputs):
            return False
        arguments = [(old.args, new.args), *((old.kwargs[key], new.kwargs[key]) for key in old.kwargs)]
        self.pairs.update(zip(new.outputs, old.outputs, strict=True))
        return all(self._equal(*pair) for pair in arguments)

    def _equal(self, old: Any, new: Any) -> bool:
        if isinstance(old, Ref) and isinstance(new, Ref):
            return self._paired(old.value, new.value)
        if isinstance(old, tuple) and isinstance(new, tuple):
            return len(old) == len(new) and all(self._equal(*pair) for pair in zip(old, new, strict=True))
        return type(old) is type(new) and bool(old == new)

    def _paired(self, old: int, new: int) -> bool:
        """Whether two values correspond. Values of tensors that no module registers are not known, so these match none."""
        if new in self.made and new not in self.pairs:
            self.exits[new] = self.pairs[new] = old
        if self._empty(self.before, old) and self._empty(self.after, new):  # a cache without entries
            self.pairs.setdefault(new, old)
        return self.pairs.get(new) == old

    def _empty(self, trace: Trace, value: int) -> bool:
        return trace.values[value].kind == "constant" and 0 in trace.values[value].shape

    def _outputs(self, end: int) -> bool:
        old, new = list(self.before.outputs), list(self.after.outputs)
        first = {output for op in self.before.ops[:end] for output in op.outputs} | set(self.pairs.values())
        old = [value for value in old if value in first]  # without the outputs of later passes
        return len(old) == len(new) and all(self._paired(*pair) for pair in zip(old, new, strict=True))

    def _passed_on(self, inside: list[Op]) -> bool:
        """Whether the block has one output, used in place of its only input of that shape."""
        values = self.after.values
        taken = {ref.value for op in inside for ref in op.refs} - self.made
        entries = [value for value in taken if not values[value].name]
        if len(self.exits) != 1:
            return False
        ((end, start),) = self.exits.items()
        fitting = [value for value in entries if values[value].shape == values[end].shape]
        return len(fitting) == 1 and self.pairs.get(fitting[0]) == start
