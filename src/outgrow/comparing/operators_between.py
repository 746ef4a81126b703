"""Test the operators between the layers that write a volume's units and the layers that read them.

Each operator is evaluated in isolation, with the arguments that it has in the model:

    ψ(0) = 0           zero stays zero, if new shifts (β, a running mean, a position) start at zero too
    ψ(ψ(x)) = ψ(x)     idempotent
    ψ(P x) = P ψ(x)    alike: P swaps two units together with their own parameters (γ, a slope)
    x_i → ψ(x)_i       apart: the value of one unit does not influence another

An operator that treats units alike keeps equal units equal: the paper calls this maintaining channel dependencies (MCD). New
units must also not influence old ones: a softmax over units treats them alike, but not apart. A function of several operators,
such as x · sigmoid(x), is tested as one: all operators from one value to the next input of a layer, a norm or a sum.
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

POINTS = 512  # the least number of points at which an activation is evaluated
WIDE = 8.0  # the points lie between −WIDE and WIDE
CLOSE = 1e-9  # tolerance relative to the largest value


@dataclass(frozen=True)
class Operator:
    """An operator, or several that form one function, with its test results; None where a test does not apply."""

    name: str
    places: tuple[str, ...]  # modules whose code runs it
    zero: bool | None
    idempotent: bool | None
    alike: bool | None
    apart: bool | None
    tested: bool = True  # False: it does not run in isolation, and the results are those of its rule

    def __str__(self) -> str:
        more = f" + {len(self.places) - 1} more" if len(self.places) > 1 else ""
        rule = "" if self.tested else ", by its rule"
        return f"{self.name} ({self.places[0]}{more}{rule})" if any(self.places[:1]) else f"{self.name}{more}{rule}"


@dataclass(frozen=True)
class OperatorChain:
    """Operators that compute one value from others."""

    ops: tuple[Op, ...]
    entries: tuple[int, ...]
    exit: int


@dataclass(frozen=True)
class UnitPath:
    """The operators between a volume's writers and readers."""

    operators: tuple[Operator, ...]
    sums: tuple[str, ...]  # modules whose code adds two values that carry the units: residual connections
    zero: bool  # units written as zero reach all readers as zero (through a gate even where its sigmoid is not zero)


def unit_path(model: nn.Module, example: Example, volume: Volume) -> UnitPath:
    """Find and test all operators between a volume's writers and readers."""
    anatomy = dissect_on_real_tensors(model, example)
    same = [other for other in anatomy.volumes if other.name == volume.name and other.count == volume.count]
    if not same:
        raise TraceError(f"the model runs differently each time: {volume.name} was not found in the second run")
    finder = Finder(anatomy, same[0])
    finder.run()
    probe = Probe(finder, TracedValues(model, example, anatomy, external_inputs(finder.passed_through, finder.root)))
    places: dict[Operator, list[str]] = {}
    for chain in finder.chains:
        places.setdefault(probe.test(chain), []).append(chain.ops[-1].module)
    operators = tuple(replace(operator, places=tuple(dict.fromkeys(modules))) for operator, modules in places.items())
    return UnitPath(operators, tuple(finder.sums), probe.keeps_zero())


class Finder:
    """Follows the units from their writers, and splits their path into chains of operators.

    Every value on the path has a root: the value that it is a function of, within one chain. The outputs of layers, norms, sums
    of two roots and changes of shape are roots.
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
            return  # it selects other units that were concatenated with these
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
        """End the chains of values that a layer, a norm or a sum takes: each is one function of its root."""
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
    """Runs chains of operators on chosen values."""

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
        except Exception:  # they do not run in isolation: use their rules
            effects = [self.reading.effects[op.index] for op in chain.ops]
            mixing = any(isinstance(effect, (Mix, Normalise, Reduce, Folded)) for effect in effects)
            zero = not mixing and all(not isinstance(effect, Map) or effect.zero for effect in effects)
            return Operator(name, (), zero, None, not mixing, not mixing, tested=False)

    def run_chain(self, chain: OperatorChain, given: Mapping[int, Tensor]) -> Tensor:
        return rerun(chain.ops, given, self.values)[chain.exit]

    def draw(self, chain: OperatorChain) -> dict[int, Tensor]:
        """Random values between −WIDE and WIDE for the inputs of a chain."""
        shapes = {value: self.reading.trace.values[value].shape for value in chain.entries}
        return {
            value: WIDE * (2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1)
            for value, shape in shapes.items()
        }

    def own(self, chain: OperatorChain) -> dict[int, Tensor]:
        """The parameters and buffers of a chain with entries per unit."""
        taken = {ref.value for op in chain.ops for ref in op.refs}
        mine = [value for value in taken if self.reading.constant[value] and self.finder.places.carries(value)]
        return {value: self.values[value] for value in mine}

    @torch.no_grad()
    def keeps_zero(self) -> bool:
        """Whether all readers get zeros if all writers write zeros."""
        finder = self.finder
        whole = OperatorChain(tuple(finder.passed_through), tuple(finder.written), -1)
        try:
            made = rerun(whole.ops, self.zeros(whole), self.values)
        except Exception:  # they do not run in isolation
            return all(self.test(chain).zero for chain in finder.chains)
        return all(self._is_zero(value, made[value]) for value in finder.read if finder.places.carries(value))

    def zeros(self, chain: OperatorChain) -> dict[int, Tensor]:
        """Zeros for the inputs of a chain and for its additive parameters; its scales stay."""
        roles, values, layouts = self.volume.births.roles, self.reading.trace.values, self.reading.layouts
        own = self.own(chain)
        adds = [
            v for v in own if any(roles.get(key, set()) & {WRITES, SHIFTS} for key in self.finder.places.slots_in(layouts[v]))
        ]
        return own | {v: torch.zeros(values[v].shape, dtype=torch.float64) for v in (*chain.entries, *adds)}

    def _zero(self, chain: OperatorChain) -> bool:
        return self._is_zero(chain.exit, self.run_chain(chain, self.zeros(chain)))

    def _is_zero(self, value: int, x: Tensor) -> bool:
        """Whether a value is zero at all units of the volume; other units may be concatenated with them."""
        mine = self.of_units(value) if self.finder.places.carries(value) else torch.ones(x.shape, dtype=torch.bool)
        return bool((x[mine] == 0).all())

    def _idempotent(self, chain: OperatorChain) -> bool | None:
        """Whether a chain is idempotent; None if it is not a function of one value without parameters per unit."""
        shapes = [self.reading.trace.values[value].shape for value in (*chain.entries, chain.exit)]
        if len(chain.entries) != 1 or self.own(chain):
            return None
        if shapes[0] != shapes[-1]:
            return False
        size = max(int(np.prod(shapes[0])), 1)
        for _ in range(-(-POINTS // size)):
            once = self.run_chain(chain, self.draw(chain))
            if not close(self.run_chain(chain, {chain.entries[0]: once}), once):
                return False
        return True

    def _alike(self, chain: OperatorChain) -> bool:
        given = self.draw(chain) | self.own(chain)
        swapped = self.run_chain(chain, {value: self.swapped(value, x) for value, x in given.items()})
        return close(swapped, self.swapped(chain.exit, self.run_chain(chain, given)))

    def _apart(self, chain: OperatorChain) -> bool:
        given, other = self.draw(chain), self.draw(chain)
        changed = {value: torch.where(self.of_units(value, 0), other[value], x) for value, x in given.items()}
        before, after = self.run_chain(chain, given), self.run_chain(chain, changed)
        mine = self.of_units(chain.exit, 0)
        return close(torch.where(mine, 0.0, after), torch.where(mine, 0.0, before))

    def of_units(self, value: int, unit: int | None = None) -> Tensor:
        """A mask of the entries of a value that belong to a unit, or to any unit."""
        shape = self.reading.trace.values[value].shape
        mine = torch.zeros(shape, dtype=torch.bool)
        for block in self._blocks(value):
            ids = self.finder.places.ids(block.labels)
            here = ids >= 0 if unit is None else ids == unit
            mine |= torch.from_numpy(here.reshape([size if a in block.axes else 1 for a, size in enumerate(shape)]))
        return mine

    def swapped(self, value: int, x: Tensor) -> Tensor:
        """A value with the first and the last unit swapped."""
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
    """Whether two results agree, relative to the largest value; NaNs must coincide."""
    finite = other[torch.isfinite(other)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=0.0, atol=CLOSE * largest, equal_nan=True))
