"""Blocks that can be the identity: x + f₁(x) + f₂(…) with branches that can be made zero.

The block is traced by itself, on the inputs that it gets in the model's forward pass. From its output the skip is followed back
to its input through sums; the other summands are its branches. An activation ψ after a sum must not change the block's input:
that has passed an activation φ already, and ψ(φ(x)) = φ(x) (ReLU after ReLU; not GELU). Any other ψ that is a module of the
block can start as a P-activation, (1 − λ)·x + λ·ψ(x), if the block fades in. A norm on the skip (post-norm transformers) can't
be the identity: a block with one fades in as a whole, x + λ·(block(x) − x).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.effects import Contract, Effect, Ignore, Map, Move, Normalise, PerUnit, Scale, Sum
from outgrow.analysis.rules.elementwise import SAME
from outgrow.analysis.rules.reduce import POOL_LINEAR
from outgrow.analysis.volumes import Anatomy
from outgrow.errors import TraceError
from outgrow.exactness.constants_through import operand_factor
from outgrow.exactness.zero_output import NotZero, Search, Zeroing
from outgrow.model.example import outputs_in
from outgrow.model.module_calls import Call
from outgrow.trace.evaluate_operator import base_name, evaluated, results_of
from outgrow.trace.operators import Op

SAMPLES = 1601  # torch abbreviates more than 1000 values in messages, which it writes on the way to the right overload


@dataclass(frozen=True, eq=False)
class Identity:
    """How to make a block the identity: by its weights, or by gates after some of its modules.

    skip_activations: activations on its skip, each with the number of the output that the skip leads to.
    soft: modules of the block on its skip that start as P-activations. whole: there are no such modules, and a gate around the
    block is needed.
    """

    anatomy: Anatomy
    zeroing: Zeroing
    gates: tuple[str, ...] = ()
    skip_activations: tuple[tuple[int, Op], ...] = ()
    soft: tuple[str, ...] = ()
    whole: bool = False


def identity_of(
    block: nn.Module, given: Call, literal: bool = False, faded: bool = False, anatomy: Anatomy | None = None
) -> Identity:
    """How to make a block the identity; raises NotZero with the reason if there is no way.

    anatomy: the block's own, if it is known.
    """
    anatomy = dissect_alone(block, given) if anatomy is None else anatomy
    reading = anatomy.reading
    shapes = [tuple(tensor.shape) for tensor in outputs_in(given.output)]
    inputs = [value.index for value in reading.trace.values if value.kind == "input"]
    if not shapes or not inputs:
        raise NotZero("it takes or returns no tensor")
    pairs = _through(anatomy, inputs, shapes)
    try:
        return _by_parts(block, anatomy, pairs, literal, faded)
    except NotZero:
        if not faded or len(pairs) != 1 or not _around_layers(anatomy, *pairs[0]):
            raise
        return Identity(anatomy, Search(anatomy, literal).found(), whole=True)


def _by_parts(block: nn.Module, anatomy: Anatomy, pairs: Sequence[tuple[int, int]], literal: bool, faded: bool) -> Identity:
    """How to make a block the identity by making each of its branches zero. pairs: inputs, and outputs that must equal them."""
    search = Search(anatomy, literal)
    gates: list[str] = []
    soft: list[str] = []
    skip_activations: list[tuple[int, Op]] = []
    found = False
    for number, (start, end) in enumerate(pairs):
        skip = SkipConnection(anatomy, start, faded)
        branches = skip.branches(end)
        soft += [_own_module(block, op) for op in skip.changing]
        found |= bool(branches)
        skip_activations += [(number, op) for op in skip.skip_activations]
        if faded:
            gates += [_gate_at(anatomy, branch) for branch in branches]
        else:
            for branch in branches:
                search.zero(branch)
    if not found:
        raise NotZero("it adds nothing to its input")
    return Identity(anatomy, search.found(), tuple(dict.fromkeys(gates)), tuple(skip_activations), tuple(dict.fromkeys(soft)))


def check_skip_activations(identity: Identity, before: nn.Module, given: Call) -> None:
    """Raise NotZero if an activation on a block's skip would change the output of the module before the block."""
    anatomy = dissect_alone(before, given) if identity.skip_activations else identity.anatomy
    for number, op in identity.skip_activations:
        last = _ending(anatomy, list(anatomy.reading.trace.outputs)[number])
        if last is None or not _keeps(op, last):
            raise NotZero(f"{op.name} after its sum would change its input, which has passed no such activation")


def _ending(anatomy: Anatomy, value: int) -> Op | None:
    """The last activation before a value."""
    while value in anatomy.maker:
        op = anatomy.maker[value]
        match anatomy.reading.effects[op.index]:
            case Map(inputs=(_,)):
                return op
            case Move(inputs=(source,)) if base_name(op) not in POOL_LINEAR:
                value = source
            case _:
                break
    return None


def _through(anatomy: Anatomy, inputs: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """Pairs of an input and the output that must equal it: the first ones, and others of equal shape."""
    values = anatomy.reading.trace.values
    outputs = list(anatomy.reading.trace.outputs)
    if not outputs or values[inputs[0]].shape != shapes[0]:
        raise NotZero(f"it turns {values[inputs[0]].shape} into {shapes[0]}: a block that keeps the shape is needed")
    pairs = list(zip(inputs, outputs, strict=False))
    return [(start, end) for start, end in pairs if values[start].shape == values[end].shape]


def dissect_alone(module: nn.Module, given: Call) -> Anatomy:
    """The anatomy of a module, traced on its inputs in the model."""
    try:
        return dissect(module, given.example)
    except TraceError as error:
        raise NotZero(f"it does not run by itself ({error.__cause__})") from error


def _gate_at(anatomy: Anatomy, value: int) -> str:
    """The module whose output, times λ, makes a branch λ times itself: the last one, if only scales come after it."""
    reading = anatomy.reading
    while value in anatomy.maker:
        op = anatomy.maker[value]
        last = max(o.index for o in reading.trace.ops if o.module == op.module or o.module.startswith(f"{op.module}."))
        if op.module and op.index == last:
            return op.module
        match reading.effects[op.index]:
            case Move(inputs=(source,)) | Scale(input=source):
                value = source
            case Contract(left=left, right=right, contracted=axes) if not axes:
                value = left.value if reading.constant[right.value] else right.value
            case _:
                break
    raise NotZero("a branch ends in the block's own code, not in a module after which a gate could be inserted")


def _around_layers(anatomy: Anatomy, start: int, end: int) -> bool:
    """Whether a value reaches another one past all layers, of which there are some: a skip, with norms or activations on it."""
    if not any(_is_layer(effect) for effect in anatomy.reading.effects):
        return False
    values = seen = {end}
    while values and start not in seen:
        ops = [anatomy.maker[value] for value in values if value in anatomy.maker]
        passed = [op for op in ops if not _is_layer(anatomy.reading.effects[op.index])]
        values = {ref.value for op in passed for ref in op.refs} - seen
        seen = seen | values
    return start in seen


def _is_layer(effect: Effect | None) -> bool:
    return effect is None or (isinstance(effect, Contract) and bool(effect.contracted))


def _own_module(block: nn.Module, op: Op) -> str:
    """The path of the module that computes an activation on the skip, so that a P-activation can take its place."""
    module = block.get_submodule(op.module)
    held = sum(child is module for parent in block.modules() for child in parent._modules.values())
    if not op.module or module._modules or any(True for _ in (*module.parameters(), *module.buffers())):
        raise NotZero(
            f"{op.name} after its sum is not idempotent, and is computed by code of {op.module or 'the block'}: "
            "as a module of its own without parameters, e.g. self.act = nn.GELU(), it could fade in too"
        )
    if held > 1:
        raise NotZero(f"{op.name} after its sum is not idempotent, and the block holds that module under several names")
    return op.module


class SkipConnection:
    """The path from a block's input to its output that passes no layer.

    softened: activations that would change the block's input are allowed, and collected in `changing`.
    """

    def __init__(self, anatomy: Anatomy, start: int, softened: bool = False) -> None:
        self.softened = softened
        self.changing: list[Op] = []
        self.anatomy, self.start = anatomy, start
        self.reading = anatomy.reading
        self.skip_activations: list[Op] = []  # activations on the skip
        self._reaches: dict[int, bool] = {start: True}

    def branches(self, value: int) -> list[int]:
        """The values that are added to the skip between the input and a value."""
        found: list[int] = []
        moves: list[tuple[Op, int]] = []
        while value != self.start:
            op = self.anatomy.maker.get(value)
            effect = None if op is None else self.reading.effects[op.index]
            if op is None or effect is None:
                raise NotZero("it has no skip: its output is not made by adding to its input")
            place = op.module or "the block itself"
            match effect:
                case Sum():
                    skips = [side.value for side in effect.inputs if self.reaches(side.value)]
                    if len(skips) != 1:
                        raise NotZero("it has no skip: its output is not made by adding to its input")
                    factor = operand_factor(op, [side.value for side in effect.inputs].index(skips[0]))
                    if factor != 1:
                        raise NotZero(f"its input is multiplied by {factor:g} where it is added ({place})")
                    found += [side.value for side in effect.inputs if side.value != skips[0]]
                    value = skips[0]
                case Move(inputs=(source,)) if len(op.refs) == 1:
                    moves.append((op, op.outputs.index(value)))
                    value = source
                case Ignore() if len(op.refs) == 1:  # on the input itself, which carries no units of the block
                    moves.append((op, op.outputs.index(value)))
                    value = op.refs[0].value
                case Map(inputs=(source,)):
                    keeps = idempotent(op)
                    if not keeps and not self.softened:
                        raise NotZero(f"{op.name} after its sum is not idempotent ({place})")
                    (self.skip_activations if keeps else self.changing).append(op)
                    value = source
                case Normalise() | PerUnit() if self._sums(op):
                    raise NotZero(f"a norm follows its sum (post-norm, {place}): no weights make that the identity")
                case Contract(contracted=axes) if axes and self._sums(op):
                    raise NotZero(f"there is a layer on its skip or after its sum ({place})")
                case Normalise() | PerUnit() | Contract() if not any(self.reaches(ref.value) for ref in op.refs):
                    raise NotZero(f"it has no skip: its output is made by {op.name} ({place}), not by adding to its input")
                case _:
                    raise NotZero(f"{op.name} is on its skip ({place})")
        if not _in_place(moves, self.reading.trace.values[self.start].shape):
            names = ", ".join(op.name for op, _ in moves)
            raise NotZero(f"its skip is not the identity: {names} changes values or their positions")
        return found

    def _sums(self, op: Op) -> bool:
        """Whether an operator takes a sum of two activations."""
        makers = [self.anatomy.maker.get(ref.value) for ref in op.refs]
        effects = [self.reading.effects[maker.index] for maker in makers if maker is not None]
        sums = [effect for effect in effects if isinstance(effect, Sum)]
        return any(not any(self.reading.constant[side.value] for side in effect.inputs) for effect in sums)

    def reaches(self, value: int) -> bool:
        """Whether the block's input reaches a value through sums, activations and moves alone."""
        if value not in self._reaches:
            self._reaches[value] = False
            op = self.anatomy.maker.get(value)
            match None if op is None else self.reading.effects[op.index]:
                case Sum(inputs=sides):
                    self._reaches[value] = any(self.reaches(side.value) for side in sides)
                case Move(inputs=sources) | Map(inputs=sources):
                    self._reaches[value] = any(self.reaches(source) for source in sources)
                case Ignore() if op is not None and len(op.refs) == 1:
                    self._reaches[value] = self.reaches(op.refs[0].value)
        return self._reaches[value]


def _in_place(moves: Sequence[tuple[Op, int]], shape: tuple[int, ...]) -> bool:
    """Whether operators (last first, each with its output's number) leave every value in place, found by evaluating them."""
    size = math.prod(shape)
    before = now = torch.arange(-(size // 2), size - size // 2, dtype=torch.float64).view(shape)
    try:
        for op, output in reversed(moves):
            if base_name(op) not in SAME:
                now = results_of(op, now.contiguous())[output]
    except Exception:  # it needs more inputs than this tensor: values move by data
        return False
    return torch.equal(before, now)


def idempotent(op: Op) -> bool:
    """Whether f(f(x)) = f(x), found by evaluating the operator."""
    return _keeps(op, op)


def _keeps(one: Op, other: Op) -> bool:
    """Whether f(g(x)) = g(x), found by evaluating the operators f and g."""
    x = torch.linspace(-8, 8, SAMPLES, dtype=torch.float64)
    try:
        return bool(torch.allclose(evaluated(one, evaluated(other, x)), evaluated(other, x), rtol=1e-12, atol=1e-12))
    except Exception:  # it is not an elementwise function
        return False
