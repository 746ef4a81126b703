"""States of new units, the demands that follow for readers, and the other results of a walk along their path."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

from outgrow.analysis.exponents import NONE, Exponent


class State(Enum):
    """The values of new units where they are written: they decide through which operators a method is exact.

    PAIR: units come in twins with equal values; twins are read with opposite signs. COPY: each equals an existing unit, and
    the two share the unit's columns in readers. ANY: arbitrary values; columns that read them must be zero. ZERO: all are
    zero. MEAN: each equals the mean of the existing units. CONST arises inside the network, and is not for methods.
    """

    PAIR = "pairs"
    COPY = "copies"
    ANY = "arbitrary values"
    ZERO = "zeros"
    MEAN = "the mean"
    CONST = "a constant"  # all units are equal, old and new


READER = {
    State.PAIR: "sign",
    State.COPY: "share",
    State.ANY: "zero",
    State.MEAN: "zero",
    State.ZERO: "free",
    State.CONST: "sign",
}
STRICTNESS = ("free", "sign", "share", "whole", "zero", "spread", "mean")


@dataclass(frozen=True)
class Ratio:
    """Old over new number of entries in a statistic, if each new unit adds `per_unit` entries."""

    old: int
    per_unit: int

    def __call__(self, new_units: int) -> float:
        return self.old / (self.old + self.per_unit * new_units)


@dataclass(frozen=True)
class Rescale:
    """Multiply all existing values of a tensor, plus `offset`, by ratio ** exponent: v ← (v + offset)·factor − offset.

    factor: the factor itself, where a library has rounded it.
    """

    tensor: str
    ratio: Ratio
    exponent: Fraction
    offset: float = 0.0
    factor: float | None = None


@dataclass(frozen=True)
class MoveEps:
    """Multiply the ε that a module adds at an operator by ratio ** exponent."""

    op: int
    module: str
    eps: float
    ratio: Ratio
    exponent: Fraction


Rows = tuple[str, int, tuple[int, ...]]  # tensor, axis, positions


@dataclass(frozen=True)
class ScoreScalar:
    """An operator that multiplies with size^(−exponent), or divides by size^exponent, where size is that of a head."""

    op: int
    value: float
    exponent: Fraction
    divides: bool

    def after(self, ratio: float) -> float:
        """The scalar after a growth. ratio: old over new size."""
        return self.value * math.pow(ratio, float(-self.exponent if self.divides else self.exponent))


@dataclass(frozen=True)
class ScoreFeatures:
    """A product q·kᵀ that sums over the units: new rows of k are zero, old rows of q make up for scales that follow the size.

    See `exactness/score_features.py`.
    """

    op: int
    zeroed: tuple[Rows, ...]
    kept: tuple[Rows, ...]
    ratio: Ratio
    scalars: tuple[ScoreScalar, ...]
    offset: float = 0.0  # the code adds it to the zeroed values: they are −offset

    def factor(self, new_units: int) -> float:
        """The factor on the old rows of q."""
        return math.pow(self.ratio(new_units), -float(sum((scalar.exponent for scalar in self.scalars), Fraction(0))))


@dataclass
class Verdict:
    """What a state demands of the slots of a volume, or the reason why it is refused.

    readers: for (tensor, axis) of each reader, the new columns it must have: "sign" (opposite for twins), "share" (the parts
    of a unit and its copies add up to one), "whole" (copies that are not shared out), "zero", "free", "mean" (of the row), or
    "spread" (mean plus or minus).
    """

    state: State
    refusal: str = ""
    stuck: str = ""  # why units that start at zero, though exact, would never learn or would jump at the first step
    readers: dict[tuple[str, int], str] = field(default_factory=dict)
    rescales: list[Rescale] = field(default_factory=list)
    eps: list[MoveEps] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)  # writer → the tensor that scales its rows before they are averaged
    multiples: bool = False  # only whole copies of all units
    folded: bool = False  # a folded residual reads or writes it
    scalars: dict[int, Fraction] = field(default_factory=dict)  # power of C/C′ on the scalar of an operator
    paid: bool = False  # what writes it is rescaled, so that no ε changes
    tied: str = ""  # a tensor that writes copies and reads them, so that the scale of what it reads is compensated before it
    compared: str = ""  # where a norm, a sum or a product of activations runs over copies, so that tensors may be rescaled
    scores: list[ScoreFeatures] = field(default_factory=list)


@dataclass(frozen=True)
class Carried:
    """What is known about a value: the state of its new units, the factor ratio ** exponent on its old values, its writers."""

    state: State | None  # None: it carries none of the volume's units
    exponent: Exponent = NONE
    ratio: Ratio | None = None
    mean: int | None = None  # another value, if this one is its mean over the volume's units
    writers: frozenset[tuple[str, str]] = frozenset()  # tensors, each with the tensor that has scaled its rows ("": none)
    standardised: bool = False  # a standardised weight of a reader: its columns are chosen to suit the standardisation
    scaleless: bool = False  # zeros, or a mask: whatever the scale of the values that they are combined with


class Refused(Exception):
    """Raised inside a walk; becomes the verdict's refusal."""


def blended(states: set[State | None]) -> State | None:
    """The state of a sum or concatenation of values in these states."""
    known = states - {None}
    if len(known) <= 1:
        return next(iter(known), None)
    if known == {State.PAIR, State.ZERO}:
        return State.PAIR
    if State.CONST in known and len(known) == 2 and State.MEAN not in known:
        other = next(iter(known - {State.CONST}))
        return State.ANY if other is State.ZERO else other
    return State.ANY
