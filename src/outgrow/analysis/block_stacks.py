"""Stacks: runs of equal blocks in a trace, one after the other, compared operator by operator.

A *segment* of a trace begins with the first operator of a block (`layers.3`) and ends before the first one of the next block.
If several kinds of blocks alternate, a segment holds one of each kind. Two segments are equal if their operators are equal one
by one, with equal arguments, on corresponding values: of equal shapes, with equal names within their blocks. In a *run* of
equal segments each value is one of these:

    made        created by an operator of the segment; used there and in the next segment only
    own         a parameter, buffer or constant that is used in this segment only
    shared      the same value in every segment (position embeddings, masks)
    carried     made by the previous segment, at the same place in each (the residual stream)
    given       a different value for each segment, made before the run (the number of tokens in a layer's cache)

Nothing is assumed about blocks that were not compared: a block with another constant, another mask, a shared parameter or one
more operator (from a hook, for example) ends the run. The last block of a container is never part of a run: its segment has no
end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from outgrow.analysis.repeated_blocks import NUMBERED
from outgrow.trace.operators import Op, Ref, Trace

PERIODS = (1, 2, 3, 4, 5, 6)  # kinds of blocks in a pattern
SHORTEST = 3  # segments in a run: the first, the second, which represents all others, and one more


@dataclass(frozen=True, eq=False)
class Segment:
    """Operators from `start` to before `end`: those of the modules `paths` and of the code between them and the next module."""

    paths: tuple[str, ...]
    start: int
    end: int

    def __contains__(self, op: int) -> bool:
        return self.start <= op < self.end


@dataclass(frozen=True, eq=False)
class BlockRun:
    """Equal segments; `values[s][j]` is value number j of segment s, in the order of appearance."""

    segments: list[Segment]
    values: list[list[int]]
    shared: list[int]  # places j of values that are the same in all segments
    carried: list[tuple[int, int]]  # places of values that the previous segment made, and their places there
    kept: list[int]  # places of values that belong to the segment: made there, or its own
    given: list[int]  # places of values that were made before the run


@dataclass(frozen=True, eq=False)
class Uses:
    """The operators that make each value, use it first and use it last; −1 where there is none."""

    made: list[int]
    first: list[int]
    last: list[int]

    @classmethod
    def of(cls, trace: Trace) -> Uses:
        made, first, last = ([-1] * len(trace.values) for _ in range(3))
        for op in trace.ops:
            for output in op.outputs:
                made[output] = op.index
            for ref in op.refs:
                if first[ref.value] < 0:
                    first[ref.value] = op.index
                last[ref.value] = op.index
        for value in trace.outputs:
            last[value] = len(trace.ops)
        return cls(made, first, last)


def find_runs(trace: Trace, uses: Uses) -> list[BlockRun]:
    """Runs of equal segments that do not overlap, those of outer containers first."""
    found: list[BlockRun] = []
    for blocks in _containers(trace):
        if any(run.segments[0].start <= blocks[0].start < run.segments[-1].end for run in found):
            continue
        best: list[BlockRun] = []
        for period in PERIODS:
            runs = list(_runs(trace, uses, blocks, period))
            if _spared(runs) > _spared(best):
                best = runs
            if 2 * _spared(best) >= len(blocks):
                break
        found += best
    return found


def _spared(runs: Sequence[BlockRun]) -> int:
    """How many blocks need not be analysed."""
    return sum((len(run.segments) - 2) * len(run.segments[0].paths) for run in runs)


def _containers(trace: Trace) -> Iterator[list[Segment]]:
    """For each container whose children run one after the other, the segments of all but its last child."""
    bounds: dict[str, dict[str, list[int]]] = {}  # container → child → first and last operator
    prefixes: dict[str, list[tuple[str, str]]] = {}
    for op in trace.ops:
        if op.module not in prefixes:
            parts = op.module.split(".")
            paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            prefixes[op.module] = [(path.rpartition(".")[0], path) for path in paths if NUMBERED.fullmatch(path)]
        for container, path in prefixes[op.module]:
            bounds.setdefault(container, {}).setdefault(path, [op.index, 0])[1] = op.index
    for children in bounds.values():
        order = sorted(children, key=lambda path: children[path][0])
        pairs = list(pairwise(order))
        if len(pairs) >= SHORTEST and all(children[one][1] < children[other][0] for one, other in pairs):
            yield [Segment((one,), children[one][0], children[other][0]) for one, other in pairs]


def _runs(trace: Trace, uses: Uses, blocks: list[Segment], period: int) -> Iterator[BlockRun]:
    """Runs of segments of `period` blocks each."""
    begin = 0
    while begin + SHORTEST * period <= len(blocks):
        segments = [_joined(blocks[at : at + period]) for at in range(begin, len(blocks) - period + 1, period)]
        run = _run_from(trace, uses, segments)
        if run is not None:
            yield run
        begin += len(run.segments) * period if run is not None else 1


def _joined(blocks: Sequence[Segment]) -> Segment:
    return Segment(tuple(path for block in blocks for path in block.paths), blocks[0].start, blocks[-1].end)


def _run_from(trace: Trace, uses: Uses, segments: Sequence[Segment]) -> BlockRun | None:
    """The run that the first segments form; None if it is too short."""
    run: BlockRun | None = None
    for before, here in pairwise(segments):
        pairs = SegmentComparison(trace, before, here).values()
        if pairs is None:
            break
        if run is None:
            run = _begun(trace, uses, before, here, pairs)
            if run is None:
                return None
            continue
        known = dict(zip(run.values[-2], run.values[-1], strict=True))
        given = [pairs[run.values[-1][place]] for place in run.given]
        fits = list(pairs) == run.values[-1] and _linked(run, known, pairs) and _early(uses, run.segments[0], *given)
        if not fits or not _closed(uses, run, here):
            break
        run.segments.append(here)
        run.values.append(list(pairs.values()))
    while run is not None and len(run.segments) >= SHORTEST:
        if _left_only_as_carried(uses, run):
            return run
        run.segments.pop()
        run.values.pop()
    return None


def _begun(trace: Trace, uses: Uses, before: Segment, here: Segment, pairs: dict[int, int]) -> BlockRun | None:
    """A run of two equal segments, with the kinds of their values; None if a value is of no known kind."""
    shared, carried, kept, given = [], [], [], []
    places = {value: place for place, value in enumerate(pairs)}
    for place, (first, second) in enumerate(pairs.items()):
        if first == second:
            shared.append(place)
        elif uses.made[first] in before or _own(trace, uses, first, before):
            kept.append(place)
        elif uses.made[second] in before:
            carried.append((place, places[second]))
        elif _early(uses, before, first, second):
            given.append(place)
        else:
            return None
    run = BlockRun([before, here], [list(pairs), list(pairs.values())], shared, carried, kept, given)
    return run if _closed(uses, run, here) else None


def _early(uses: Uses, segment: Segment, *values: int) -> bool:
    """Whether values were made by operators before a segment."""
    return all(0 <= uses.made[value] < segment.start for value in values)


def _own(trace: Trace, uses: Uses, value: int, segment: Segment) -> bool:
    item = trace.values[value]
    inside = not item.name or any(item.name.startswith(f"{path}.") for path in segment.paths)
    return item.kind in ("parameter", "buffer", "constant") and inside and uses.made[value] < 0


def _linked(run: BlockRun, known: dict[int, int], pairs: dict[int, int]) -> bool:
    """Whether a further segment takes from the previous one what that one took from its own predecessor."""
    values = run.values[-1]
    return all(pairs[values[place]] == known[values[place]] for place, _ in run.carried) and all(
        pairs[values[place]] == values[place] for place in run.shared
    )


def _closed(uses: Uses, run: BlockRun, end: Segment) -> bool:
    """Whether values of the last complete segment are used only there and in the next one."""
    at = len(run.segments) - (2 if run.segments[-1] is end else 1)
    segment, values = run.segments[at], run.values[at]
    for place in run.kept:
        value = values[place]
        if uses.made[value] < 0:
            if uses.first[value] < segment.start or uses.last[value] >= segment.end:
                return False
        elif uses.last[value] >= end.end:
            return False
    return True


def _left_only_as_carried(uses: Uses, run: BlockRun) -> bool:
    """Whether values of the last segment are used after it only where the next segment would use them."""
    segment, values = run.segments[-1], run.values[-1]
    passed_on = {place for _, place in run.carried}
    for place in run.kept:
        first, last = uses.first[values[place]], uses.last[values[place]]
        if uses.made[values[place]] < 0 and first < segment.start:
            return False
        if last >= segment.end and (uses.made[values[place]] < 0 or place not in passed_on):
            return False
    return True


class SegmentComparison:
    """Compares two segments, and records which values correspond."""

    def __init__(self, trace: Trace, first: Segment, second: Segment) -> None:
        self.trace, self.first, self.second = trace, first, second
        self.pairs: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.names: dict[str, str] = {}

    def values(self) -> dict[int, int] | None:
        """For each value of the first segment, in order of appearance, that of the second; None if the segments differ."""
        first, second = self.first, self.second
        ops = self.trace.ops
        if first.end - first.start != second.end - second.start:
            return None
        alike = all(map(self._op, ops[first.start : first.end], ops[second.start : second.end]))
        return self.pairs if alike else None

    def _op(self, one: Op, other: Op) -> bool:
        return (
            one.name == other.name
            and self._name(one.module) == other.module
            and len(one.outputs) == len(other.outputs)
            and self._argument(one.args, other.args)
            and self._argument(one.kwargs, other.kwargs)
            and all(map(self._value, one.outputs, other.outputs))
        )

    def _name(self, name: str) -> str:
        """The name in the second segment of a module or tensor of the first."""
        if name not in self.names:
            found = name
            for one, other in zip(self.first.paths, self.second.paths, strict=True):
                if name == one or name.startswith(f"{one}."):
                    found = other + name[len(one) :]
            self.names[name] = found
        return self.names[name]

    def _value(self, one: int, other: int) -> bool:
        if one in self.pairs:
            return self.pairs[one] == other
        if other in self.back:
            return False
        a, b = self.trace.values[one], self.trace.values[other]
        self.pairs[one], self.back[other] = other, one
        same = (a.shape, a.floating, a.kind, a.boolean) == (b.shape, b.floating, b.kind, b.boolean)
        return same and self._name(a.name) == b.name

    def _argument(self, one: Any, other: Any) -> bool:
        kind = type(one)
        if kind is not type(other):  # 1 and 1.0 are equal, and may mean different things
            return False
        if kind is Ref:
            return self._value(one.value, other.value)
        if kind is tuple or kind is list:
            return len(one) == len(other) and all(map(self._argument, one, other))
        if kind is dict:
            return list(one) == list(other) and all(map(self._argument, one.values(), other.values()))
        return bool(one == other)
