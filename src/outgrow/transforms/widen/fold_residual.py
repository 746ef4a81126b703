"""Widen one volume of a residual stream and leave the others unchanged: `residual="fold"`.

The sums x^i = f(x^{i−1}) + x^ℓ tie all values of a stream to one size. In a trace, an operand of a sum is the *skip* if the
other operand was computed from it (or from a value that shares its channels). Cut at the skips, the stream separates into the
paper's volumes x^ℓ, each with the branch that writes it, the projections that join it and the layers that read it.

A Fold, at first the identity, is grafted onto every skip that enters or leaves the named volume, and the model is analysed
again: x^ℓ is then a separate volume, which widens like any other, and the Folds follow (`regrow_folds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.effects import Contract, Folded, Ignore, Sum
from outgrow.analysis.labels import Labels
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.fold_skips import Unreadable, apply_graft, fold_refusal, graft_at
from outgrow.errors import MethodError, Problem, SelectionError
from outgrow.growth_plan.plan import Graft
from outgrow.methods.net2net import Net2Net
from outgrow.methods.netmorph import NetMorph
from outgrow.methods.r2r import R2R
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.requests import Widen, is_glob
from outgrow.trace.operators import FOLD, Trace, refs_in
from outgrow.trace.record import record

FOLDED_METHODS = ("auto", "r2r", "netmorph", "net2net")
Edge = tuple[int, int]  # a sum in the trace, and which of its operands


@dataclass(frozen=True)
class Cuts:
    """The skips at which a stream can be cut, and those around one volume, which separate it from the rest."""

    skips: frozenset[Edge]
    around: tuple[Edge, ...]
    axes: dict[Edge, int]


def fold_residuals(
    model: nn.Module, example: Example, anatomy: Anatomy, requests: Sequence[Widen], journal: Journal
) -> tuple[Anatomy, list[Widen], tuple[Graft, ...]]:
    """Separate the volumes that requests fold; returns the new analysis, requests that name these volumes, and the grafts."""
    folded = [(request, path) for request in requests if request.residual == "fold" for path in _paths(request)]
    cuts = {path: find_cuts(anatomy, path) for _, path in folded}
    for request, path in folded:
        _check_method(request, path, cuts[path])
    grafts: list[Graft] = []
    trace = anatomy.reading.trace
    for cut in cuts.values():
        for edge in cut.around:
            graft = _graft(model, example, trace, edge, cut, journal)
            grafts += [graft] if graft is not None else []
    if grafts:
        before, anatomy = trace, dissect(model, example, both_modes=len(trace.passes) > 1)
        found = edges_of_folds(before, anatomy.reading.trace)
        skips = frozenset[Edge]().union(*(cut.skips for cut in cuts.values()))
        wanted = {edge for cut in cuts.values() for edge in cut.around}
        if found is None or not wanted <= found <= skips:
            raise fold_refusal(grafts[0].block, "the changed code does not run as before")
    return anatomy, [new for request in requests for new in _renamed(anatomy, request)], tuple(grafts)


def _paths(request: Widen) -> tuple[str, ...]:
    for pattern in request.patterns:
        if is_glob(pattern):
            raise SelectionError(
                f"residual='fold' widens single volumes: name the modules that write them instead of {pattern!r}, "
                "e.g. where=('layer1.0.conv2', 'layer1.1.conv2')"
            )
    return request.patterns


def _check_method(request: Widen, path: str, cuts: Cuts) -> None:
    method = request.method
    if cuts.around and method not in FOLDED_METHODS and not isinstance(method, (R2R, Net2Net, NetMorph)):
        name = method if isinstance(method, str) else method.name
        reason = "the skip takes pairs, copies, zeros or unread units, which R2R, Net2Net and NetMorph write"
        instead = "method='r2r', 'netmorph' or 'net2net', or residual='stream' to widen the whole stream by another method"
        raise MethodError(f"a residual can't be folded by method {name}", [Problem(path, reason, instead)])


def _renamed(anatomy: Anatomy, request: Widen) -> Iterator[Widen]:
    """Requests with the present names of the volumes."""
    if request.residual != "fold":
        yield request
        return
    names = {path: _volume_of(anatomy, path) for path in request.patterns}
    yield replace(request, where=tuple(dict.fromkeys(names.values())), residual="stream")


def _volume_of(anatomy: Anatomy, path: str) -> str:
    """The name of the volume that a module writes; the path itself where there is none or more than one."""
    names = [volume.name for volume in anatomy.volumes if path in volume.writers]
    return names[0] if len(names) == 1 and path not in {volume.name for volume in anatomy.volumes} else path


def find_cuts(anatomy: Anatomy, path: str) -> Cuts:
    """The skips of the stream that a module writes, and the skips at the borders of its volume."""
    written, mine = _written(anatomy, path)
    if not written:
        return Cuts(frozenset(), (), {})
    stream = _Stream(anatomy, mine)
    skips = stream.cut()
    here = {stream.part(value) for value in written}
    around = []
    for index, operand in sorted(skips):
        effect = anatomy.reading.effects[index]
        assert isinstance(effect, Sum)
        ends = effect.inputs[operand].value, anatomy.reading.trace.ops[index].outputs[0]
        if (stream.part(ends[0]) in here) != (stream.part(ends[1]) in here):
            around.append((index, operand))
    return Cuts(frozenset(skips), tuple(around), {edge: stream.axis(*edge) for edge in around})


def _written(anatomy: Anatomy, path: str) -> tuple[list[int], Labels]:
    """The values that a module's parameters write, and the classes of their channels."""
    slots = [s for v in anatomy.volumes for s in v.slots if s.role == "writes" and s.tensor.rpartition(".")[0] == path]
    reading, values = anatomy.reading, anatomy.reading.trace.values
    origins = [anatomy.origin[slot.tensor, slot.axis] for slot in slots]
    born = [np.arange(origin.start, origin.start + origin.size) for origin in origins]
    mine = np.unique(anatomy.root[np.concatenate(born)]) if born else np.empty(0, dtype=np.int64)
    todo = [value.index for value in values if value.name in {slot.tensor for slot in slots}]
    written: dict[int, None] = {}
    while todo:
        for index in anatomy.consumers.get(todo.pop(), ()):
            for output in reading.trace.ops[index].outputs:
                hosts = [b for b in reading.layouts[output] if np.isin(anatomy.root[b.labels], mine).any()]
                if reading.constant[output]:
                    todo.append(output)
                elif any(len(block.axes) > 1 for block in hosts):
                    return [], mine  # heads or groups: this is not a stream
                elif hosts:
                    written[output] = None
    return list(written), mine


class _Stream:
    """The values that carry some classes of channels, joined into parts whose values must have the same size."""

    def __init__(self, anatomy: Anatomy, classes: Labels) -> None:
        self.anatomy, self.reading = anatomy, anatomy.reading
        self.mine = np.zeros(len(anatomy.root), dtype=np.bool_)
        self.mine[classes] = True
        self.parent = list(range(len(self.reading.trace.values)))
        self.maker = {output: op for op in self.reading.trace.ops for output in op.outputs}
        self.sums: list[int] = []
        for op, effect in zip(self.reading.trace.ops, self.reading.effects, strict=True):
            inputs = self._passed_on(op.index)
            for output in op.outputs if inputs else ():
                if not self.carries(output):
                    continue
                if isinstance(effect, Sum) and len(set(inputs)) > 1:
                    self.sums.append(op.index)
                else:
                    self._join(output, *inputs)

    def _passed_on(self, index: int) -> list[int]:
        """Operands that carry the stream's channels and pass them on to the operator's result."""
        op, effect = self.reading.trace.ops[index], self.reading.effects[index]
        match effect:
            case Folded() | Ignore():
                values = []
            case Sum():
                values = [side.value for side in effect.inputs]
            case Contract():
                values = []
                for side in (effect.left, effect.right):
                    axes = {axis for block in side.layout if self._meets(block.labels) for axis in block.axes}
                    if axes and not axes & effect.contracted:
                        values.append(side.value)
            case _:
                values = [ref.value for ref in refs_in((op.args, op.kwargs))]
        return [value for value in values if self.carries(value)]

    def _meets(self, labels: Labels) -> bool:
        return bool(self.mine[self.anatomy.root[labels]].any())

    def carries(self, value: int) -> bool:
        return not self.reading.constant[value] and any(self._meets(block.labels) for block in self.reading.layouts[value])

    def part(self, value: int) -> int:
        while self.parent[value] != value:
            self.parent[value] = self.parent[self.parent[value]]
            value = self.parent[value]
        return value

    def _join(self, *values: int) -> None:
        for value in values[1:]:
            self.parent[self.part(value)] = self.part(values[0])

    def cut(self) -> set[Edge]:
        """Find the skips; all other operands of sums join the sum's result."""
        skips: set[Edge] = set()
        for index in self.sums:
            effect = self.reading.effects[index]
            assert isinstance(effect, Sum)
            left, right = (side.value for side in effect.inputs)
            if self.part(left) != self.part(right):
                made_from = self._made_from(right, left), self._made_from(left, right)
                if made_from[0] != made_from[1]:
                    skips.add((index, made_from.index(True)))
        for index in self.sums:
            effect = self.reading.effects[index]
            assert isinstance(effect, Sum)
            for operand, side in enumerate(effect.inputs):
                if (index, operand) not in skips:
                    self._join(self.reading.trace.ops[index].outputs[0], side.value)
        return skips

    def _made_from(self, value: int, source: int) -> bool:
        """Whether a value was computed from a source, or from a value that shares the source's channels."""
        goal, todo, seen = self.part(source), [value], {value}
        while todo:
            current = todo.pop()
            if self.part(current) == goal:
                return True
            if current in self.maker:
                op = self.maker[current]
                fresh = {ref.value for ref in refs_in((op.args, op.kwargs))} - seen
                seen |= fresh
                todo.extend(fresh)
        return False

    def axis(self, index: int, operand: int) -> int:
        """The axis of the channels at a skip."""
        effect = self.reading.effects[index]
        assert isinstance(effect, Sum)
        layout = self.reading.layouts[effect.inputs[operand].value]
        hosts = [block for block in layout if self._meets(block.labels)]
        if len(hosts) != 1 or len(hosts[0].axes) != 1:
            raise fold_refusal(self.reading.trace.ops[index].module, "its channels lie over several axes there")
        return hosts[0].axes[0]


def _graft(model: nn.Module, example: Example, trace: Trace, edge: Edge, cuts: Cuts, journal: Journal) -> Graft | None:
    """Put a Fold on a skip, unless it is there already; returns the graft, if there is one."""
    index, operand = edge
    ref = refs_in(trace.ops[index].args)[operand]
    size = trace.values[ref.value].shape[cuts.axes[edge]]
    try:
        graft = graft_at(model, trace, index, operand, size, cuts.axes[edge])
        if graft is not None:
            apply_graft(model, graft, journal)
        return graft
    except Unreadable as why:
        reason = str(why)
    if edge in (edges_of_folds(trace, record(model, example)) or ()):
        return None
    path = trace.ops[index].module
    for name, module in model.get_submodule(path).named_modules():
        if name and type(module) is nn.Identity:
            graft = Graft(path, joined_path(path, name), -1, operand, size, cuts.axes[edge])
            trial = Journal()
            apply_graft(model, graft, trial)
            found = edges_of_folds(trace, record(model, example)) or set()
            if edge in found and found <= cuts.skips:
                journal.note(trial.undo)
                return graft
            trial.undo()
    raise fold_refusal(path, reason)


def edges_of_folds(before: Trace, after: Trace) -> set[Edge] | None:
    """The operands that run through new Folds, if two traces differ in nothing else; None if they do.

    torch.fx reads `a += b` as `a = a + b`. That is the same unless the old `a` is read again, and in a trace such a reader
    takes another value than before.
    """
    edges: set[Edge] = set()
    same: dict[int, int] = {}  # values afterwards → values before
    through: dict[int, int] = {}  # results of new Folds → the values they fold, as they were before
    count = 0
    for op in after.ops:
        old = before.ops[count] if count < len(before.ops) else None
        if old is None or (old.name.rstrip("_"), old.module) != (op.name.rstrip("_"), op.module):
            if op.name != FOLD:
                return None
            through[op.outputs[0]] = same.get(op.args[0].value, -1)
            continue
        refs, olds = refs_in((op.args, op.kwargs)), refs_in((old.args, old.kwargs))
        if len(refs) != len(olds) or len(op.outputs) != len(old.outputs):
            return None
        for position, (new, was) in enumerate(zip(refs, olds, strict=True)):
            if new.value in through and through[new.value] == was.value:
                edges.add((count, position))
            elif same.setdefault(new.value, was.value) != was.value:
                return None
        same.update(zip(op.outputs, old.outputs, strict=True))
        count += 1
    return edges if count == len(before.ops) else None
