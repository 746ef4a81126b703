"""Interpret a trace by the rules: which labels every tensor carries, and what every operator does to units.

The operators are visited once, in order. Nothing is guessed about an operator without a rule: labels that it touches are
pinned, with that as the reason, and everything else can still grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from outgrow.analysis.dot_products import fuse_dots
from outgrow.analysis.effects import Effect, Ignore, Move, Operand, Scale
from outgrow.analysis.expanded_axes import repeated_axes
from outgrow.analysis.labels import RETURNED, Block, Layout, Ties, meet, pin, renumber
from outgrow.analysis.looked_up_weights import fuse_lookups
from outgrow.trace.operators import Op, Ref, Trace
from outgrow.trace.operators import refs_in as refs_in


@dataclass(frozen=True)
class Outcome:
    """The result of a rule for one operator: the layouts of the operator's results, and its effect on units."""

    layouts: tuple[Layout, ...]
    effect: Effect
    uniform: bool = False  # all values of the results are equal, so their sizes tie nothing
    zeros: bool = False  # all values of the results are zero


AlignedOperand = tuple[Ref, Layout, Mapping[int, int]]
Rule = Callable[["Reading", Op], Outcome]


class Reading:
    """Labels and effects of a whole trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ties = Ties()
        self.layouts: list[Layout] = [()] * len(trace.values)
        self.constant = [value.kind in ("parameter", "buffer", "constant") for value in trace.values]  # depends on no input
        self.foreign = [value.kind == "constant" and value.floating for value in trace.values]  # from unregistered tensors
        self.learned = [value.kind == "parameter" for value in trace.values]  # computed from parameters, perhaps among others
        self.uniform = [False] * len(trace.values)
        self.zeros = [False] * len(trace.values)  # uniform, and known to be zero
        self.summed = [False] * len(trace.values)  # computed from labelled tensors, even if a statistic removed the labels
        self.repeated: dict[
            int, frozenset[int]
        ] = {}  # value → axes along which its entries repeat (see `analysis/expanded_axes.py`)
        self.expanded: dict[int, Layout] = {}  # value → labels of such axes that a view merges with others
        self.lost: dict[int, str] = {}  # value → an earlier operator through which units can't be followed
        self.effects: list[Effect] = []
        kernels = _kernels(trace)
        for value in trace.values:
            if value.name and value.floating:
                axes = list(enumerate(value.shape))[: 2 if value.index in kernels else None]
                self.layouts[value.index] = tuple(
                    Block((axis,), self.ties.axis(value.name, axis, size)) for axis, size in axes if size > 1
                )

    def facts(self, value: int) -> Hashable:
        """Everything known about a value except for its labels, as `analysis/repeated_blocks.py` compares it."""
        known = self.constant[value], self.foreign[value], self.learned[value], self.uniform[value], self.zeros[value]
        return *known, self.repeated.get(value), self.lost.get(value)

    @cached_property
    def maker(self) -> dict[int, Op]:
        """For each value, the operator that makes it."""
        return {output: op for op in self.trace.ops for output in op.outputs}

    @cached_property
    def read(self) -> set[int]:
        """Values that an operator reads, or that the model returns."""
        returned = [value for values in (self.trace.outputs, *self.trace.others.values()) for value in values]
        return {ref.value for op in self.trace.ops for ref in op.refs}.union(returned)

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.trace.values[ref.value].shape

    def fixed(self, ref: Ref) -> bool:
        """Whether a value depends on no input; this includes a single value that the code creates."""
        return self.constant[ref.value] or (self.uniform[ref.value] and math.prod(self.shape(ref)) == 1)

    def layout(self, ref: Ref) -> Layout:
        return self.layouts[ref.value]

    def operand(self, ref: Ref) -> Operand:
        return Operand(ref.value, self.layout(ref))

    def spread(self, ref: Ref, rank: int) -> Layout:
        """The operand's layout with axes counted as in a broadcast result of `rank` axes."""
        missing = rank - len(self.shape(ref))
        return renumber(self.layout(ref), lambda axis: axis + missing)

    def pin(self, layout: Layout, axes: Sequence[int], reason: str, op: Op) -> None:
        for block in layout:
            for axis in block.axes:
                if axis in axes:
                    pin(self.ties, block, axis, reason, op.module)

    def pin_all(self, refs: Sequence[Ref], reason: str, op: Op) -> None:
        """Forbid growth of everything that an operator touches; its results carry no labels."""
        name = op.name.replace("outgrow.write_through_view", "a write through a view").replace("outgrow.", "a ")
        self.lost.update(dict.fromkeys(op.outputs, name))
        for ref in refs:
            for block in self.layout(ref):
                self.ties.fix(block.labels, reason, op.module)

    def meet(self, op: Op, operands: Sequence[AlignedOperand], shape: Sequence[int]) -> Layout:
        """Layout of an elementwise combination; each operand is its reference, its layout and the sizes of its axes."""
        return meet(self.ties, self.growable_layouts(op, operands), shape)

    def _foreign(self, ref: Ref) -> str:
        if self.foreign[ref.value]:
            return "it is combined with a tensor that no module registers (layers in a plain list? use nn.ModuleList)"
        if self.constant[ref.value]:
            return "its size is that of a fixed table (a buffer or constant)"
        if ref.value in self.lost:
            return f"it is combined with a result of {self.lost[ref.value]}, and units can't be followed through that operator"
        derived = self.trace.values[ref.value].kind != "input"
        return "its size is set by the model's input" + (", or by a number in its code" if derived else "")

    def inherit(self, op: Op, output: int, outcome: Outcome) -> None:
        """Copy facts from the operands to a result that hold for every operator."""
        source = next((self.lost[ref.value] for ref in op.refs if ref.value in self.lost), None)
        if source is not None:
            self.lost.setdefault(output, source)
        axes = repeated_axes(op, self.trace, self.repeated, self.uniform)
        if axes:
            self.repeated[output] = axes
        kept = isinstance(outcome.effect, (Move, Scale)) and bool(op.refs) and all(self.zeros[ref.value] for ref in op.refs)
        self.zeros[output] = outcome.zeros or kept

    def growable_layouts(self, op: Op, operands: Sequence[AlignedOperand]) -> list[Layout]:
        """The operands' layouts, without the axes on which one of them has a size that does not come from parameters.

        Labels on these axes can never grow: they are pinned, and dropped from the layouts.
        """
        bare: set[int] = set()
        why = ""
        for ref, layout, sizes in operands:
            covered = {axis for block in layout for axis in block.axes}
            here = {axis for axis, size in sizes.items() if size > 1 and axis not in covered}
            if here and not self.uniform[ref.value]:
                bare |= here
                why = self._foreign(ref)
        if not bare:
            return [layout for _, layout, _ in operands]
        layouts = []
        for _, layout, _ in operands:
            self.pin(layout, sorted(bare), why, op)
            layouts.append(tuple(block for block in layout if not set(block.axes) <= bare))
        return layouts


def _kernels(trace: Trace) -> set[int]:
    """Weights of convolutions, also standardised or scaled ones: their axes from the third on hold no units."""
    maker = {output: op for op in trace.ops for output in op.outputs}
    found: set[int] = set()
    seen: set[int] = set()
    for op in trace.ops:
        if op.name != "aten.convolution":
            continue
        kernel = trace.values[op.args[1].value].shape[2:]
        todo = [op.args[1].value]
        while todo:
            value = trace.values[todo.pop()]
            if value.name and value.shape[2:] == kernel:
                found.add(value.index)
            elif value.index in maker and value.index not in seen:
                seen.add(value.index)
                todo.extend(ref.value for ref in refs_in(maker[value.index].args))
    return found


def _no_rule(op: Op) -> str:
    way_out = f"outgrow.rule({op.name.replace('.', '::', 1)!r}) adds one"
    if "_backward" in op.name:
        way_out = "it belongs to a backward pass inside the model: take gradients by torch.autograd.grad"
    return f"operator {op.name} has no rule ({way_out})"


def read(trace: Trace, rules: Mapping[str, Rule]) -> Reading:
    """Apply the rule of every operator, in order, then pin the labels of the model's outputs."""
    reading = Reading(trace)
    for op in trace.ops:
        refs = op.refs
        rule = rules.get(op.name) or rules.get(op.name.removesuffix("_"))
        labelled = any(reading.layouts[ref.value] for ref in refs)
        touched = labelled or any(reading.summed[ref.value] for ref in refs)
        uniform = bool(refs) and all(reading.uniform[ref.value] for ref in refs)
        learned = any(reading.learned[ref.value] for ref in refs)
        stays = uniform and not labelled and not getattr(rule, "varies", False)
        if rule is None:
            if labelled:
                reading.pin_all(refs, _no_rule(op), op)
            outcome = Outcome(((),) * len(op.outputs), Ignore())
        elif not touched and not uniform and not getattr(rule, "always", False):
            outcome = Outcome(((),) * len(op.outputs), Ignore())
        else:
            outcome = rule(reading, op)
        for index, output in enumerate(op.outputs):
            reading.layouts[output] = outcome.layouts[index] if index < len(outcome.layouts) else ()
            reading.summed[output] = touched
            reading.inherit(op, output, outcome)
            reading.constant[output] = any(reading.constant[r.value] for r in refs) and all(map(reading.fixed, refs))
            reading.foreign[output] = reading.constant[output] and any(reading.foreign[ref.value] for ref in refs)
            reading.learned[output] = learned
            reading.uniform[output] = outcome.uniform or stays
        reading.effects.append(outcome.effect)
    fuse_dots(reading)
    fuse_lookups(reading)
    for output in trace.outputs:
        for block in reading.layouts[output]:
            for axis in block.axes:
                pin(reading.ties, block, axis, RETURNED, "")
    return reading
