"""What an operator does to units: the few kinds of effects that `exactness/propagate_states.py` reasons about.

Rules translate each ATen operator into one of these; methods never see an operator. An operand is a value together with its
layout over the operator's own axes (for a grouped convolution, channels are groups × channels).
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.analysis.labels import Layout


@dataclass(frozen=True)
class Operand:
    """A tensor as the operator sees it."""

    value: int
    layout: Layout


@dataclass(frozen=True)
class Move:
    """Indices change places and values stay (view, cat, slice), or values are averaged over axes that carry no unit.

    repeats: units that the inputs do not carry come from axes along which they were expanded, so their values are equal.
    """

    inputs: tuple[int, ...]
    repeats: bool = False


@dataclass(frozen=True)
class Map:
    """The same function on every value. `zero`: f(0) = 0; `homogeneous`: f(s·x) = s·f(x) for s > 0."""

    inputs: tuple[int, ...]
    zero: bool
    homogeneous: bool = False


@dataclass(frozen=True)
class Shift:
    """x + c for a constant c, which may be the ε of a norm written with elementary operators."""

    input: int
    constant: float


@dataclass(frozen=True)
class Power:
    """x ** exponent."""

    input: int
    exponent: float


@dataclass(frozen=True)
class Scale:
    """c·x for a constant c."""

    input: int


@dataclass(frozen=True)
class Sum:
    """a ± b."""

    inputs: tuple[Operand, ...]
    minus: bool = False


@dataclass(frozen=True)
class Contract:
    """Σ over `contracted` of left · right: matrix products and convolutions; the plain product if nothing is contracted."""

    left: Operand
    right: Operand
    contracted: frozenset[int]
    divide: bool = False
    bias: int | None = None


@dataclass(frozen=True)
class Reduce:
    """A statistic over axes: "sum", "mean", "var", "std", "norm" (root of the sum of squares), "extreme" or "other"."""

    input: int
    axes: frozenset[int]
    how: str


@dataclass(frozen=True)
class Normalise:
    """(x − mean)/√(var + ε)·γ + β with statistics over `axes` of the operand."""

    input: Operand
    axes: frozenset[int]
    gamma: Operand | None
    beta: Operand | None
    eps: float


@dataclass(frozen=True)
class PerUnit:
    """A function of each unit alone, with parameters per unit: batch norm, PReLU."""

    input: int
    scales: tuple[int, ...]
    shifts: tuple[int, ...]


@dataclass(frozen=True)
class Mix:
    """Any other operator through which units along `axes` influence each other."""

    inputs: tuple[Operand, ...]
    axes: frozenset[int]
    reason: str
    shares: bool = False  # if all units are copied k times, each copy gets 1/k of the unit's value (softmax)


@dataclass(frozen=True)
class Folded:
    """A folded residual r: it cancels, shares, adds or drops new units of its input, according to their state. New units of its
    output are copies if the method writes copies, and zero otherwise."""

    input: int


@dataclass(frozen=True)
class Ignore:
    """Computes values from sizes alone, or touches no unit."""


@dataclass(frozen=True)
class Fused:
    """Part of a later operator, whose effect covers both (see `analysis/dot_products.py`)."""


Effect = Move | Map | Shift | Power | Scale | Sum | Contract | Reduce | Normalise | PerUnit | Mix | Folded | Ignore | Fused


VALUE_FIELDS: dict[type, tuple[str, ...]] = {  # fields of an effect that name values of the trace, other than operands
    Move: ("inputs",),
    Map: ("inputs",),
    Shift: ("input",),
    Power: ("input",),
    Scale: ("input",),
    Sum: (),
    Contract: ("bias",),
    Reduce: ("input",),
    Normalise: (),
    PerUnit: ("input", "scales", "shifts"),
    Mix: (),
    Folded: ("input",),
    Ignore: (),
    Fused: (),
}


def operands_of(effect: Effect) -> tuple[Operand, ...]:
    """The operands of an effect that come with a layout of their own."""
    match effect:
        case Sum() | Mix():
            return effect.inputs
        case Contract():
            return effect.left, effect.right
        case Normalise():
            return tuple(side for side in (effect.input, effect.gamma, effect.beta) if side is not None)
    return ()
