"""Test what lies on the way of a volume's units, between the layers that write them and those that read them.

Operators are asked, not looked up. Each is run by itself, with the arguments that it has in the model:

    ψ(0) = 0           zero stays zero, where new shifts (β, a running mean, a position) start at zero too
    ψ(ψ(x)) = ψ(x)     idempotent
    ψ(P x) = P ψ(x)    alike: P swaps two units, with all that they have of their own (γ, a slope)
    x_i → ψ(x)_i       apart: what one unit is does not show in another

Alike keeps equal units equal: what the paper calls maintaining channel dependencies (MCD). New units must be kept apart from
old ones besides: a softmax over units treats them alike, but not apart. A function that is spelled out, such as x · sigmoid(x),
is run as one: all operators from one value to the next that a layer, a norm or a sum takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from outgrow.analysis.effects import Contract, Effect, Folded, Ignore, Map, Mix, Move, Normalise, PerUnit, Reduce, Sum
from outgrow.analysis.labels import Layout
from outgrow.analysis.roles import SHIFTS, WRITES
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.comparing.rerun_operators import TracedValues, dissect_on_real_tensors, external_inputs, function_name, rerun
from outgrow.errors import TraceError
from outgrow.exactness.unit_places import UnitPlaces
from outgrow.model.example import Example
from outgrow.trace.operators import Op

POINTS = 512  # at which an activation is tried, at least
WIDE = 8.0  # they lie between −WIDE and WIDE
CLOSE = 1e-9  # relative to the largest number


@dataclass(frozen=True)
class Operator:
    """An operator, or several that are one function, and what tests have shown of it; None where it can't be tested."""

    name: str
    places: tuple[str, ...]  # modules whose code runs it
    zero: bool | None
    idempotent: bool | None
    alike: bool | None
    apart: bool | None
    tested: bool = True  # otherwise it does not run by itself, and this is what its rule says

    def __str__(self) -> str:
        more = f" + {len(self.places) - 1} more" if len(self.places) > 1 else ""
        rule = "" if self.tested else ", by its rule"
        return f"{self.name} ({self.places[0]}{more}{rule})" if any(self.places[:1]) else f"{self.name}{more}{rule}"


@dataclass(frozen=True)
class OperatorChain:
    """Operators that make one value of others."""

    ops: tuple[Op, ...]
    entries: tuple[int, ...]
    exit: int


@dataclass(frozen=True)
class UnitPath:
    """What lies between a volume's writers and readers."""

    operators: tuple[Operator, ...]
    sums: tuple[str, ...]  # modules whose code adds two values that carry the units: residual connections
    zero: bool  # units that are written as zero arrive at all readers as zero: a gate may do what its sigmoid does not


def unit_path(model: nn.Module, example: Example, volume: Volume) -> UnitPath:
    """Find and test everything on the way of a volume's units."""
    anatomy = dissect_on_real_tensors(model, example)
    same = [other for other in anatomy.volumes if other.name == volume.name and other.count == volume.count]
    if not same:
        raise TraceError(f"the model runs in another way each time: {volume.name} was not seen again")
    finder = Finder(anatomy, same[0])
    finder.run()
    probe = Probe(finder, TracedValues(model, example, anatomy, external_inputs(finder.passed_through, finder.root)))
    places: dict[Operator, list[str]] = {}
    for chain in finder.chains:
        places.setdefault(probe.test(chain), []).append(chain.ops[-1].module)
    operators = tuple(replace(operator, places=tuple(dict.fromkeys(modules))) for operator, modules in places.items())
    return UnitPath(operators, tuple(finder.sums), probe.keeps_zero())


class Finder:
    """Follows the units from their writers on, and cuts their way into chains.

    Every value on the way has a root: the value that it is a function of, by operators that go on from one to the next. A
    layer's output is a root, and so is what a norm, a sum of two roots or a change of shape puts out.
    """

    def __init__(self, anatomy: Anatomy, volume: Volume) -> None:
        self.anatomy, self.reading, self.places = anatomy, anatomy.reading, UnitPlaces(anatomy, volume)
        self.root: dict[int, int] = {}
        self.found: dict[int, OperatorChain] = {}  # by exit
        self.sums: list[str] = []
        self.written: list[int] = []
        self.read: list[int] = []
        self.passed_through: list[Op] = []

    @property
    def chains(self) -> list[OperatorChain]:
        return [self.found[exit] for exit in sorted(self.found)]

    def run(self) -> None:
        for op in self.reading.trace.ops:
            effect = self.reading.effects[op.index]
            if not isinstance(effect, Ignore) and not all(self.reading.constant[output] for output in op.outputs):
                self._step(op, effect, tuple(dict.fromkeys(ref.value for ref in op.refs if ref.value in self.root)))

    def _step(self, op: Op, effect: Effect, taken: tuple[int, ...]) -> None:
        own = [ref.value for ref in op.refs if self.reading.constant[ref.value] and self.places.carries(ref.value)]
        if not taken or self._reads(effect):
            self._leave(taken)
            self.read += taken
            self.written += [output for output in op.outputs if self.places.carries(output)]
            self.root.update({output: output for output in op.outputs if self.places.carries(output)})
            return
        if isinstance(effect, Move) and not any(map(self.places.carries, op.outputs)) and any(map(self.places.carries, taken)):
            return  # what is picked out here are other units that were laid beside these
        self.passed_through.append(op)
        roots = {self.root[value] for value in taken}
        shapes = [self.reading.trace.values[value].shape for value in (*taken, *op.outputs[:1])]
        joins = not own and len(roots) == 1 and not isinstance(effect, (PerUnit, Normalise, Mix, Folded))
        joins = joins and not (isinstance(effect, Contract) and effect.contracted)
        if isinstance(effect, (Map, Move)) and shapes[0] != shapes[-1]:  # pooling, views
            joins = False
        if joins:
            self.root.update(dict.fromkeys(op.outputs, roots.pop()))
            return
        self._leave(taken)
        if isinstance(effect, Sum):
            self.sums += [] if own else [op.module]
        elif not isinstance(effect, Move):
            self.found[op.outputs[0]] = OperatorChain((op,), taken, op.outputs[0])
        self.root.update({output: output for output in op.outputs})

    def _reads(self, effect: Effect) -> bool:
        if not isinstance(effect, Contract):
            return False
        constant = any(self.reading.constant[side.value] for side in (effect.left, effect.right))
        return constant and bool(
            (self.places.axes(effect.left.layout) | self.places.axes(effect.right.layout)) & effect.contracted
        )

    def _leave(self, values: Sequence[int]) -> None:
        """Values that go to a layer, a norm or a sum: what made them of their roots is one function."""
        for value in values:
            root, todo = self.root[value], [value]
            last = self.anatomy.maker[value]
            if value != root and isinstance(self.reading.effects[last.index], Reduce) and self.places.carries(value):  # pooling
                source = last.args[0].value
                self._leave([source])
                self.found[value] = OperatorChain((last,), (source,), value)
                continue
            ops: dict[int, Op] = {}
            while todo:
                made = todo.pop()
                op = self.anatomy.maker.get(made)
                if made == root or op is None or op.index in ops:
                    continue
                ops[op.index] = op
                todo.extend(ref.value for ref in op.refs if self.root.get(ref.value) == root)
            if any(not isinstance(self.reading.effects[index], Move) for index in ops):
                self.found[value] = OperatorChain(tuple(ops[index] for index in sorted(ops)), (root,), value)


class Probe:
    """Runs chains on values of our choosing."""

    def __init__(self, finder: Finder, values: TracedValues) -> None:
        self.finder, self.values = finder, values
        self.reading, self.volume = finder.reading, finder.places.volume
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def test(self, chain: OperatorChain) -> Operator:
        name = function_name(chain.ops)
        try:
            zero, twice = self._zero(chain), self._idempotent(chain)
            return Operator(name, (), zero, twice, self._alike(chain), self._apart(chain))
        except Exception:  # they do not run by themselves: what their rules say of them
            effects = [self.reading.effects[op.index] for op in chain.ops]
            mixing = any(isinstance(effect, (Mix, Normalise, Reduce, Folded)) for effect in effects)
            zero = not mixing and all(not isinstance(effect, Map) or effect.zero for effect in effects)
            return Operator(name, (), zero, None, not mixing, not mixing, tested=False)

    def play(self, chain: OperatorChain, given: Mapping[int, Tensor]) -> Tensor:
        return rerun(chain.ops, given, self.values)[chain.exit]

    def draw(self, chain: OperatorChain) -> dict[int, Tensor]:
        """TracedValues between −WIDE and WIDE for all that a chain takes."""
        shapes = {value: self.reading.trace.values[value].shape for value in chain.entries}
        return {
            value: WIDE * (2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1)
            for value, shape in shapes.items()
        }

    def own(self, chain: OperatorChain) -> dict[int, Tensor]:
        """Parameters and buffers with entries for each unit that a chain computes with."""
        taken = {ref.value for op in chain.ops for ref in op.refs}
        mine = [value for value in taken if self.reading.constant[value] and self.finder.places.carries(value)]
        return {value: self.values[value] for value in mine}

    @torch.no_grad()
    def keeps_zero(self) -> bool:
        """Whether all readers get zeros if all writers write them."""
        finder = self.finder
        whole = OperatorChain(tuple(finder.passed_through), tuple(finder.written), -1)
        try:
            made = rerun(whole.ops, self.zeros(whole), self.values)
        except Exception:  # they do not run by themselves
            return all(self.test(chain).zero for chain in finder.chains)
        return all(self._is_zero(value, made[value]) for value in finder.read if finder.places.carries(value))

    def zeros(self, chain: OperatorChain) -> dict[int, Tensor]:
        """Zeros for what a chain takes, and for what its parameters add; its scales stay."""
        roles, values, layouts = self.volume.births.roles, self.reading.trace.values, self.reading.layouts
        own = self.own(chain)
        adds = [
            v for v in own if any(roles.get(key, set()) & {WRITES, SHIFTS} for key in self.finder.places.slots_in(layouts[v]))
        ]
        return own | {v: torch.zeros(values[v].shape, dtype=torch.float64) for v in (*chain.entries, *adds)}

    def _zero(self, chain: OperatorChain) -> bool:
        return self._is_zero(chain.exit, self.play(chain, self.zeros(chain)))

    def _is_zero(self, value: int, x: Tensor) -> bool:
        """Whether all values of the volume's units are zero; others may be laid beside them."""
        mine = self.of_units(value) if self.finder.places.carries(value) else torch.ones(x.shape, dtype=torch.bool)
        return bool((x[mine] == 0).all())

    def _idempotent(self, chain: OperatorChain) -> bool | None:
        """Only a function of one value without parameters for each unit is an activation that could be applied twice."""
        shapes = [self.reading.trace.values[value].shape for value in (*chain.entries, chain.exit)]
        if len(chain.entries) != 1 or self.own(chain):
            return None
        if shapes[0] != shapes[-1]:
            return False
        size = max(int(np.prod(shapes[0])), 1)
        for _ in range(-(-POINTS // size)):
            once = self.play(chain, self.draw(chain))
            if not close(self.play(chain, {chain.entries[0]: once}), once):
                return False
        return True

    def _alike(self, chain: OperatorChain) -> bool:
        given = self.draw(chain) | self.own(chain)
        swapped = self.play(chain, {value: self.swapped(value, x) for value, x in given.items()})
        return close(swapped, self.swapped(chain.exit, self.play(chain, given)))

    def _apart(self, chain: OperatorChain) -> bool:
        given, other = self.draw(chain), self.draw(chain)
        changed = {value: torch.where(self.of_units(value, 0), other[value], x) for value, x in given.items()}
        before, after = self.play(chain, given), self.play(chain, changed)
        mine = self.of_units(chain.exit, 0)
        return close(torch.where(mine, 0.0, after), torch.where(mine, 0.0, before))

    def of_units(self, value: int, unit: int | None = None) -> Tensor:
        """Which values of a value belong to a unit, or to any."""
        shape = self.reading.trace.values[value].shape
        mine = torch.zeros(shape, dtype=torch.bool)
        for block in self._blocks(value):
            ids = self.finder.places.ids(block.labels)
            here = ids >= 0 if unit is None else ids == unit
            mine |= torch.from_numpy(here.reshape([size if a in block.axes else 1 for a, size in enumerate(shape)]))
        return mine

    def swapped(self, value: int, x: Tensor) -> Tensor:
        """A value with the first and the last unit in each other's place."""
        for block in self._blocks(value):
            ids = self.finder.places.ids(block.labels).ravel()
            order = np.arange(ids.size)
            first, last = np.flatnonzero(ids == 0), np.flatnonzero(ids == self.volume.count - 1)
            order[first], order[last] = last, first
            front = list(range(len(block.axes)))
            moved = x.movedim(block.axes, front)
            flat = moved.flatten(0, len(front) - 1) if front else moved
            x = flat[torch.from_numpy(order)].view(moved.shape).movedim(front, block.axes).contiguous()
        return x

    def _blocks(self, value: int) -> Layout:
        return tuple(block for block in self.reading.layouts[value] if self.finder.places.axes((block,)))


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two results agree, relative to the largest number; what is no number must be none in both."""
    finite = other[torch.isfinite(other)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=0.0, atol=CLOSE * largest, equal_nan=True))
