"""The final activation of a module: the longest elementwise function before its output.

Walking back from the output, the operators visited so far are a function of one value wherever a single value feeds them all.
Such a function is an activation if it commutes with permutations of all entries, ψ(P x) = P ψ(x); so x · sigmoid(x) is found as
one activation, and a convolution or a norm ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from outgrow.analysis.volumes import Anatomy
from outgrow.comparing.operators_between import POINTS, WIDE, Operator, close
from outgrow.comparing.rerun_operators import TracedValues, dissect_on_real_tensors, external_inputs, function_name, rerun
from outgrow.model.module_calls import Call
from outgrow.trace.operators import Op


def ends_in(module: nn.Module, given: Call) -> Operator | None:
    """The activation before a module's output, tested; None if there is none, or if the module does not run by itself."""
    try:
        anatomy = dissect_on_real_tensors(module, given.example)
    except Exception:
        return None
    found: Function | None = None
    for ops, entry in _cuts(anatomy):
        values = TracedValues(module, given.example, anatomy, external_inputs(ops, [entry]))
        longer = Function(ops, entry, next(iter(anatomy.reading.trace.outputs)), values)
        if longer.keeps_shape and not longer.elementwise():
            break
        found = longer if longer.keeps_shape else found
    if found is None or not function_name(found.ops):
        return None
    return Operator(function_name(found.ops), (found.ops[-1].module,), found.zero(), found.idempotent(), alike=True, apart=True)


def _cuts(anatomy: Anatomy) -> Iterator[tuple[tuple[Op, ...], int]]:
    """Growing sets of operators before the output, each a function of one value."""
    trace = anatomy.reading.trace
    ops: dict[int, Op] = {}
    front = set(list(trace.outputs)[:1])
    while True:
        makers = {anatomy.maker[value].index: anatomy.maker[value] for value in front if value in anatomy.maker}
        if not makers:
            return
        last = makers[max(makers)]
        ops[last.index] = last
        front = {value for value in (*front, *(ref.value for ref in last.refs)) if value not in last.outputs}
        front = {value for value in front if not anatomy.reading.constant[value]}
        if len(front) == 1:
            yield tuple(ops[index] for index in sorted(ops)), next(iter(front))


class Function:
    """Operators that compute one value from another."""

    def __init__(self, ops: tuple[Op, ...], entry: int, exit: int, values: TracedValues) -> None:
        self.ops, self.entry, self.exit, self.values = ops, entry, exit, values
        self.shape = values.values_of[entry].shape
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return rerun(self.ops, {self.entry: x}, self.values)[self.exit]

    def draw(self) -> Tensor:
        return WIDE * (2 * torch.rand(self.shape, generator=self.generator, dtype=torch.float64) - 1)

    @property
    def keeps_shape(self) -> bool:
        return self.shape == self.values.values_of[self.exit].shape

    def elementwise(self) -> bool:
        values = self.values.values_of
        beside = [values[value] for value in external_inputs(self.ops, [self.entry])]
        if not values[self.entry].floating or any(value.name and math.prod(value.shape) > 1 for value in beside):
            return False  # a norm with initial weights can look elementwise, but is not an activation
        x = self.draw()
        order = torch.randperm(x.numel(), generator=self.generator)
        try:
            straight, turned = self(x), self(x.flatten()[order].view(x.shape))
        except Exception:  # the operators do not run in isolation
            return False
        return close(turned, straight.flatten()[order].view(x.shape))

    def zero(self) -> bool:
        return bool((self(torch.zeros(self.shape, dtype=torch.float64)) == 0).all())

    def idempotent(self) -> bool:
        """Whether ψ(ψ(x)) = ψ(x), at `POINTS` random points or more."""
        once = [self(self.draw()) for _ in range(-(-POINTS // max(math.prod(self.shape), 1)))]
        return all(close(self(y), y) for y in once)
