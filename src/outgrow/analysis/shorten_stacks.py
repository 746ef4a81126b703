"""A trace with short stacks: of each run of equal segments the first two stay, and the second represents all others.

Operators after the run take from the second segment what they took from the last. The result is the trace of a model with fewer
blocks, and is interpreted like any other. Whether its results hold for all blocks is checked later (see
`analysis/lengthen_stacks.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outgrow.analysis.block_stacks import BlockRun, Segment, Uses, find_runs
from outgrow.trace.operators import Op, Ref, Trace


@dataclass(frozen=True, eq=False)
class Stack:
    """A run in the short trace: its two segments, their values, and the modules of the segments that were removed."""

    first: Segment
    model: Segment  # represents the copies
    copies: list[tuple[str, ...]]
    shared: list[int]
    belonging: tuple[set[int], set[int]]  # values of the first segment, and of the second
    before: list[int]  # values that the second segment takes from the first
    after: list[int]  # the corresponding values after the second segment
    given: list[list[int]]  # values that were made before the run, for each segment of it


@dataclass(frozen=True, eq=False)
class ShortTrace:
    """A short trace, its stacks, and the names of all tensors of the full trace, in order."""

    trace: Trace
    stacks: list[Stack]
    names: list[str]


def shortened(trace: Trace) -> ShortTrace | None:
    """The trace without blocks that others represent; None if there are none, or if the trace holds more than operators."""
    if len(trace.passes) != 1 or trace.idle_peers or trace.gradients:
        return None
    uses = Uses.of(trace)
    if any(value.kind == "parameter" and uses.first[value.index] < 0 for value in trace.values):
        return None
    runs = find_runs(trace, uses)
    return _Shortener(trace, runs).short() if runs else None


class _Shortener:
    def __init__(self, trace: Trace, runs: list[BlockRun]) -> None:
        self.trace, self.runs = trace, runs
        gone = {values[place] for run in runs for values in run.values[2:] for place in run.kept}
        self.kept = [value for value in trace.values if value.index not in gone]
        self.number = {value.index: number for number, value in enumerate(self.kept)}
        for run in runs:
            for _, place in run.carried:
                self.number[run.values[-1][place]] = self.number[run.values[1][place]]

    def short(self) -> ShortTrace:
        trace, at = self.trace, 0
        ops: list[Op] = []
        moved: dict[int, int] = {}  # new starts of the segments that stay
        for run in sorted(self.runs, key=lambda run: run.segments[0].start):
            moved.update({segment.start: len(ops) + segment.start - at for segment in run.segments[:2]})
            self._add(ops, at, run.segments[1].end)
            at = run.segments[-1].end
        self._add(ops, at, len(trace.ops))
        short = Trace(
            ops,
            [replace(value, index=number) for number, value in enumerate(self.kept)],
            {self.number[value]: None for value in trace.outputs},
            trace.meta,
            trace.known,
            passes=list(trace.passes),
            ends=[len(ops)],
        )
        names = [value.name for value in trace.values if value.name]
        return ShortTrace(short, [self._stack(run, moved) for run in self.runs], names)

    def _add(self, ops: list[Op], start: int, end: int) -> None:
        for op in self.trace.ops[start:end]:
            outputs = tuple(self.number[output] for output in op.outputs)
            ops.append(Op(len(ops), op.name, self._named(op.args), self._named(op.kwargs), outputs, op.module))

    def _named(self, item: Any) -> Any:
        """An argument with its values renumbered."""
        rebuilt: dict[type, Callable[[], Any]] = {
            Ref: lambda: Ref(self.number[item.value]),
            tuple: lambda: tuple(map(self._named, item)),
            list: lambda: [*map(self._named, item)],
            dict: lambda: {key: self._named(part) for key, part in item.items()},
        }
        return rebuilt[type(item)]() if type(item) in rebuilt else item

    def _stack(self, run: BlockRun, moved: dict[int, int]) -> Stack:
        first, model = (
            Segment(segment.paths, moved[segment.start], moved[segment.start] + segment.end - segment.start)
            for segment in run.segments[:2]
        )
        here = [{self.number[values[place]] for place in run.kept} for values in run.values[:2]]
        return Stack(
            first,
            model,
            [segment.paths for segment in run.segments[2:]],
            [self.number[run.values[1][place]] for place in run.shared],
            (here[0], here[1]),
            [self.number[run.values[1][place]] for place, _ in run.carried],
            [self.number[run.values[1][place]] for _, place in run.carried],
            [[self.number[values[place]] for place in run.given] for values in run.values],
        )
