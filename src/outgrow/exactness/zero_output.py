"""Make a network output zero with dense weights: the paper's zero initialisation (§4.3), for any traced module.

    y = V σ(W x),   units l and r of the hidden volume equal (W_l = W_r),   V_r = −V_l   ⇒   y = 0,

and yet both halves get a gradient: ∂y/∂V is σ(W x), and ∂y/∂W goes through ±V. The output is followed back through operators
that map zero to zero (a sum of zeros, a gate, pooling) to the last weights that read a hidden volume, whose units are then
paired. If the number of units is odd, the last one is read by a zero column.

An activation at the end that is not zero at zero may be zero at some other b (appendix C): log at 1, softplus(x) − 1 at
log(e − 1). Then pairs cancel as before, and the last bias is b. The search therefore carries a target along, the constant that
a value must be; it is zero at the output, and changes where an operator maps another constant to it.

A branch that ends in a norm is different. A norm after paired weights scales the first tiny output up to unit variance: exact
at growth, but the loss explodes one step later. There γ = β = 0 by default, and the layers before it stay unchanged; `literal`
pairs the weights instead, as in the paper (before a batch norm, or before a product with a statistic: RMS norm).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.effects import Contract, Ignore, Map, Mix, Move, Normalise, PerUnit, Power, Reduce, Scale, Shift, Sum
from outgrow.analysis.labels import Labels
from outgrow.analysis.roles import READS, weight_of
from outgrow.analysis.rules.reduce import POOL_MAX
from outgrow.analysis.slot_positions import irregular, slot_ids, unit_runs
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.errors import MethodError, Problem
from outgrow.exactness.constants_through import NoSource, keeps_constant, operand_factor, sources_of
from outgrow.exactness.stuck_at_zero import slope_at_zero
from outgrow.growth_plan.module_starts import Fill, Repeats, Write, Zeros
from outgrow.model.check_arguments import check_model
from outgrow.model.example import Example
from outgrow.model.sandbox import random_state, tensors_of
from outgrow.trace.evaluate_operator import base_name
from outgrow.trace.operators import Op
from outgrow.verify.outputs import run
from outgrow.wrong_arguments import usage

M = TypeVar("M", bound=nn.Module)
ROUNDING = 1e4  # units in the last place of the module's previous output


class NotZero(Exception):
    """Raised where an output can't be made zero; its text becomes the reason of a refusal."""


@dataclass(frozen=True)
class Pairing:
    """Units of a volume made equal two by two, and read with opposite signs by one tensor."""

    volume: Volume = field(repr=False)
    reader: tuple[str, int]  # tensor, axis


@dataclass(frozen=True)
class Zeroing:
    """What makes an output zero: pairings, tensors filled with a constant (mostly zero), and columns of zeros.

    Columns are (tensor, axis, positions).
    """

    pairings: tuple[Pairing, ...]
    fills: tuple[tuple[str, float], ...]
    columns: tuple[tuple[str, int, tuple[int, ...]], ...] = ()


class Search:
    """Follows an output back to the weights that must be paired or set to zero.

    literal: pair weights before a batch norm too. pairs: if False, the last weights become zero instead (NetMorph's rule).
    """

    def __init__(self, anatomy: Anatomy, literal: bool = False, pairs: bool = True) -> None:
        self.anatomy, self.literal, self.pairs = anatomy, literal, pairs
        self.reading = anatomy.reading
        self.pairings: list[Pairing] = []
        self.fills: list[tuple[str, float]] = []
        self.columns: list[tuple[str, int, tuple[int, ...]]] = []

    def found(self) -> Zeroing:
        return Zeroing(tuple(self.pairings), tuple(dict.fromkeys(self.fills)), tuple(self.columns))

    def zero(self, value: int) -> None:
        """Make a value zero."""
        self.make(value, 0.0)

    def make(self, value: int, target: float) -> None:
        """Make a value equal to a constant everywhere."""
        name = self.reading.trace.values[value].name
        if name in self.anatomy.buffers:
            raise NotZero(f"it adds a fixed table ({name})")
        if name:
            return self._fill(name, target)
        if self.reading.zeros[value] and not target:
            return None
        if self.reading.uniform[value] and value not in self.anatomy.maker:
            raise NotZero("it adds a constant")
        if value not in self.anatomy.maker:
            raise NotZero("it needs two layers before its output: its input reaches the output through one at most")
        op = self.anatomy.maker[value]
        effect = self.reading.effects[op.index]
        place = op.module or "the model"
        match effect:
            case Move() | Reduce(how="mean" | "extreme") if not target or keeps_constant(self.reading.trace, op, value, target):
                for source in effect.inputs if isinstance(effect, Move) else (effect.input,):
                    self.make(source, target)
            case Reduce(how="sum") if not target:
                self.zero(effect.input)
            case Map(inputs=(source,)) | Power(input=source) | Scale(input=source):
                self._first(*(partial(self.make, source, constant) for constant in self._before(op, effect, value, target)))
            case Shift():
                self.make(effect.input, target - effect.constant)
            case Sum():
                self._sum(effect, op, target)
            case Contract():
                self._product(effect, place, target)
            case PerUnit(scales=(_, *_), shifts=()) if not target:
                self.zero(effect.input)
            case PerUnit(shifts=(_, *_)):
                self._batch_norm(effect, place, target)
            case Normalise():
                if effect.gamma is None or effect.beta is None:
                    raise NotZero(f"it ends in a norm without weights ({place})")
                self.zero(effect.gamma.value)
                self.make(effect.beta.value, target)
            case Ignore() | Mix():
                raise NotZero(f"it ends in {op.name}, and outgrow does not know its output for zeros ({place})")
            case _:
                at_zero = "is not zero at zero" if not target else f"does not turn a constant into {target:g} everywhere"
                raise NotZero(f"it ends in {op.name}, which {at_zero} ({place})")

    def _fill(self, name: str, value: float) -> None:
        """Fill a parameter with a constant, or refuse if it has to be another one already."""
        if any(known != value for tensor, known in self.fills if tensor == name):
            raise NotZero(f"{name} would need two different values")
        self.fills.append((name, value))

    def _before(self, op: Op, effect: Map | Power | Scale, value: int, target: float) -> list[float]:
        """The constants that a function of one value turns into the target."""
        stays = isinstance(effect, Scale) or (isinstance(effect, Map) and effect.zero and slope_at_zero(op) != 0)
        if stays and not target:
            return [0.0]
        if base_name(op) in POOL_MAX and keeps_constant(self.reading.trace, op, value, target):
            return [target]
        try:
            return sources_of(op, target)
        except NoSource as reason:
            raise NotZero(f"it ends in {op.name}, {reason} ({op.module or 'the model'})") from None

    def _sum(self, effect: Sum, op: Op, target: float) -> None:
        """Make a sum a constant: all summands zero, except one of them if the constant is not zero; a parameter first."""
        sides = [side.value for side in effect.inputs]
        if not target:
            for side in sides:
                self.zero(side)
            return
        named = [bool(self.reading.trace.values[side].name) for side in sides]
        order = sorted(range(len(sides)), key=lambda number: not named[number])

        def carried_by(number: int) -> None:
            self.make(sides[number], target / operand_factor(op, number))
            for other in (side for index, side in enumerate(sides) if index != number):
                self.zero(other)

        self._first(*(partial(carried_by, number) for number in order))

    def _batch_norm(self, effect: PerUnit, place: str, target: float) -> None:
        """Make the output of a batch norm or instance norm a constant."""
        names = [
            [self.reading.trace.values[self._source(value)].name for value in side] for side in (effect.scales, effect.shifts)
        ]
        learnt = [[name for name in side if name and name not in self.anatomy.buffers] for side in names]
        if self.literal and (learnt[1] or not target):
            self.zero(effect.input)
            for name in names[1]:
                if name:
                    self._fill(name, target if name in learnt[1] else 0.0)
        elif all(learnt):
            for name in learnt[0]:
                self._fill(name, 0.0)
            for name in learnt[1]:
                self._fill(name, target)
        else:
            raise NotZero(f"it ends in a norm without weights ({place})")

    def _product(self, effect: Contract, place: str, target: float) -> None:
        weight = weight_of(self.reading, effect)
        if target and effect.bias is None:
            what = (
                f"it ends in a product of two activations ({place})"
                if weight is None
                else f"its last layer ({place}) has no bias"
            )
            raise NotZero(f"{what}, which would have to be {target:g}")
        one, other = effect.left.value, effect.right.value
        layout = () if weight is None else weight.layout
        columns = [block.labels for block in layout if set(block.axes) & effect.contracted]
        keys = {key for labels in columns for key in self.anatomy.born(labels)}
        if keys:
            for key in keys:
                if self.pairs:
                    self._pair(key, columns, place)
                else:
                    self._fill(key[0], 0.0)
        elif weight is None and not self.literal and self._normalises(effect):
            raise NotZero(f"it ends in a norm without weights ({place})")
        elif effect.divide:
            self.zero(one)
        elif weight is None:  # two activations: a gate, or attention without an output projection
            self._either(one, other)
        else:  # a factor per unit, or a layer that reads one channel, such as a depthwise convolution
            data = other if weight is effect.left else one
            maker = self.anatomy.maker.get(self._source(data))
            made = None if maker is None or self.literal else self.reading.effects[maker.index]
            order = (weight.value, data) if isinstance(made, Contract) and self._normalises(made) else (data, weight.value)
            self._either(*order)
        if effect.bias is not None:
            self.make(effect.bias, target)

    def _normalises(self, effect: Contract) -> bool:
        """Whether a product is x times a statistic, as in an RMS norm."""
        return not effect.contracted and any(self._statistic(side.value) for side in (effect.left, effect.right))

    def _statistic(self, value: int) -> bool:
        """Whether a value is an elementwise function of a mean, a sum or another statistic."""
        while value in self.anatomy.maker:
            match self.reading.effects[self.anatomy.maker[value].index]:
                case Reduce():
                    return True
                case Move(inputs=(source,)) | Map(inputs=(source,)):
                    value = source
                case Power(input=source) | Scale(input=source) | Shift(input=source):
                    value = source
                case _:
                    break
        return False

    def _source(self, value: int) -> int:
        """The origin of a value, before operators that only move entries."""
        while value in self.anatomy.maker:
            match self.reading.effects[self.anatomy.maker[value].index]:
                case Move(inputs=(source,)):
                    value = source
                case _:
                    break
        return value

    def _either(self, one: int, other: int) -> None:
        self._first(lambda: self.zero(one), lambda: self.zero(other))

    def _first(self, *attempts: Callable[[], None]) -> None:
        """Make the first attempt that is not refused; if all are, the refusal is that of the last."""
        before = len(self.pairings), len(self.fills), len(self.columns)
        for attempt in attempts[:-1]:
            try:
                return attempt()
            except NotZero:
                del self.pairings[before[0] :], self.fills[before[1] :], self.columns[before[2] :]
        attempts[-1]()

    def _pair(self, key: tuple[str, int], columns: list[Labels], place: str) -> None:
        """Pair the volumes that a weight reads along an axis, largest first; the remaining columns become zero."""
        origin = self.anatomy.origin[key]
        flat = np.concatenate([labels.ravel() for labels in columns])
        left = set((flat[(flat >= origin.start) & (flat < origin.start + origin.size)] - origin.start).tolist())
        read = len(left)
        for volume in sorted(self.anatomy.volumes, key=lambda volume: -volume.count):
            if volume.pinned or volume.count < 2:
                continue
            here = {position for slot in volume.slots if (slot.tensor, slot.axis) == key for position in slot.positions}
            if here and here <= left and irregular(self.anatomy, volume) is None:
                self.pairings.append(Pairing(volume, key))
                left -= here
        if 2 * len(left) > read:
            raise NotZero(f"it needs two layers before its output: {place} reads no hidden units that could be paired")
        if left:
            self.columns.append((*key, tuple(sorted(left))))


def resolved(anatomy: Anatomy, zeroing: Zeroing, seed: int | None = None) -> tuple[Write, ...]:
    """The zeros and pairs as positions in tensors, in the order in which they are written.

    seed: chooses which unit of a pair is overwritten with the other, so that two copies of a block do not start equal. Without
    a seed it is the second.
    """
    rng = None if seed is None else np.random.default_rng(seed)
    writes: list[Write] = [Fill(name, value) for name, value in zeroing.fills]
    writes += [Zeros(name, axis, positions) for name, axis, positions in zeroing.columns]
    for pairing in zeroing.pairings:
        volume = pairing.volume
        swapped = np.zeros(volume.count // 2, bool) if rng is None else rng.random(volume.count // 2) < 0.5
        for slot in volume.slots:
            if slot.role == READS and (slot.tensor, slot.axis) != pairing.reader:
                continue
            sign = -1.0 if (slot.tensor, slot.axis) == pairing.reader else 1.0
            for table in unit_runs(slot_ids(anatomy, volume, slot), volume.count):  # (run, unit, offset)
                even, odd = table[:, 0 : volume.count - 1 : 2], table[:, 1::2]
                rest = table[:, volume.count - volume.count % 2 :]
                kept, made = (np.where(swapped[None, :, None], *sides) for sides in ((odd, even), (even, odd)))
                writes.append(Repeats(slot.tensor, slot.axis, _flat(made), _flat(kept), sign))
                if sign < 0 and rest.size:
                    writes.append(Zeros(slot.tensor, slot.axis, _flat(rest)))
    return tuple(writes)


def _flat(positions: Labels) -> tuple[int, ...]:
    return tuple(positions.reshape(-1).tolist())


@torch.no_grad()
def write(module: nn.Module, writes: Sequence[Write]) -> None:
    """Write zeros and pairs into the tensors of a module."""
    tensors = tensors_of(module)
    for one in writes:
        write_into(tensors[one.tensor], one)


def write_into(tensor: Tensor, one: Write) -> None:
    """Carry out one write on its tensor; call it with gradient recording off."""
    match one:
        case Fill():
            tensor.fill_(one.value)
        case Zeros():
            tensor.index_fill_(one.axis, _index(one.at, tensor), 0.0)
        case Repeats():
            values = tensor.index_select(one.axis, _index(one.source, tensor)) * one.sign
            tensor.index_copy_(one.axis, _index(one.to, tensor), values)


def _index(positions: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64, device=like.device)


def magnitude(module: nn.Module, example: Example) -> Iterator[float]:
    """The largest absolute output in eval mode and, where the module runs there, in train mode."""
    outputs = run(module, example)
    for tensors in (outputs.evaluated, outputs.trained):
        yield max((float(t.abs().max()) for t in tensors or () if t.numel()), default=0.0)


@usage("outgrow.zero_init(module, example)")
def zero_init(module: M, example: Example, *, literal: bool = False) -> M:
    """Set the weights of a module so that it outputs zero, up to rounding, with dense weights that learn. Returns the module.

    Args:
        module: any module with two or more layers before its output; it is changed in place.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        literal: also pair the weights before a final batch norm, as the paper does; `docs/transforms.md` says why this is off.

    If an activation σ comes last, the last bias becomes a b with σ(b) = 0, which is found by evaluating σ.

    Raises MethodError, and leaves the module unchanged, if there is no such choice of weights.

    Example:
        >>> branch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> x = torch.randn(3, 4)
        >>> bool(zero_init(branch, x)(x).abs().max() < 1e-6), int((branch[2].weight == 0).sum())
        (True, 0)
    """
    check_model(module)
    with random_state():
        anatomy = dissect(module, example)
        before = list(magnitude(module, example))
        saved = copy.deepcopy({name: tensor.detach() for name, tensor in tensors_of(module).items()})
        try:
            search = Search(anatomy, literal)
            for output in anatomy.reading.trace.outputs:
                search.zero(output)
            write(module, resolved(anatomy, search.found()))
            after = list(magnitude(module, example))
            eps = max(torch.finfo(t.dtype).eps for t in tensors_of(module).values() if t.is_floating_point())
            if any(now > ROUNDING * eps * max(was, 1.0) for now, was in zip(after, before, strict=True)):
                raise NotZero(f"its output stays at {max(after):.1e} (it was {max(before):.1e})")
        except NotZero as reason:
            _put_back(module, saved)
            problem = Problem("", str(reason), "")
            raise MethodError("the module can't be made to output zero with weights that learn", [problem]) from None
        except BaseException:
            _put_back(module, saved)
            raise
    return module


@torch.no_grad()
def _put_back(module: nn.Module, saved: dict[str, Tensor]) -> None:
    for name, tensor in tensors_of(module).items():
        tensor.copy_(saved[name])
