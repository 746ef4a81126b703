"""States of new units, what they demand of readers, and what else a walk along their path finds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction


class State(Enum):
    """What new units are where they are written: this decides through which operators a method is exact.

    PAIR: units come in twins with equal values; twins are read with opposite signs. COPY: each equals an existing unit, with
    which it shares what reads it. ANY: nothing is known; what reads them must be zero. ZERO: all are zero. MEAN: each equals
    the mean of the existing units. CONST is found on the way, and is not for methods.
    """

    PAIR = "pairs"
    COPY = "copies"
    ANY = "anything"
    ZERO = "zeros"
    MEAN = "the mean"
    CONST = "a constant"  # all units alike, old and new


READER = {
    State.PAIR: "sign",
    State.COPY: "share",
    State.ANY: "zero",
    State.MEAN: "zero",
    State.ZERO: "free",
    State.CONST: "sign",
}
STRICTNESS = ("free", "sign", "share", "zero", "spread", "mean")


@dataclass(frozen=True)
class Ratio:
    """Old over new number of entries that a statistic goes over, when each new unit adds `per_unit`."""

    old: int
    per_unit: int

    def __call__(self, new_units: int) -> float:
        return self.old / (self.old + self.per_unit * new_units)


@dataclass(frozen=True)
class Rescale:
    """Multiply all existing numbers of a tensor by ratio ** exponent, with `offset` added to them meanwhile."""

    tensor: str
    ratio: Ratio
    exponent: Fraction
    offset: float = 0.0


@dataclass(frozen=True)
class MoveEps:
    """Multiply the ε that a module adds at an operator by ratio ** exponent."""

    op: int
    module: str
    eps: float
    ratio: Ratio
    exponent: Fraction


@dataclass
class Verdict:
    """What a state demands of the slots of a volume, or why it is refused.

    readers: for (tensor, axis) of each reader, what its new columns must be: "sign" (opposite for twins), "share" (the parts
    of a unit and its copies add up to one), "zero", "free", "mean" (of the row), or "spread" (mean plus or minus).
    """

    state: State
    refusal: str = ""
    stuck: str = ""  # why units that begin at zero would never learn, or leap from there, though they are exact
    readers: dict[tuple[str, int], str] = field(default_factory=dict)
    rescales: list[Rescale] = field(default_factory=list)
    eps: list[MoveEps] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)  # writer → the scale that its rows pass before they are averaged
    multiples: bool = False  # only whole copies of all units


@dataclass(frozen=True)
class Carried:
    """What is known of a value: the state of its new units, its debt, and who wrote it."""

    state: State | None  # None: it carries none of the volume's units
    exponent: Fraction = Fraction(0)
    ratio: Ratio | None = None
    mean: int | None = None  # the value whose mean over the volume's units it is
    writers: frozenset[tuple[str, str]] = frozenset()  # tensors, each with the scale that its rows have passed ("": none)
    standardised: bool = False  # a reader's weight whose new columns are zero whatever they read


class Refused(Exception):
    """Raised inside a walk; becomes the verdict's refusal."""


def blended(states: set[State | None]) -> State | None:
    """The state of several values that are added or laid side by side."""
    known = states - {None}
    if len(known) <= 1:
        return next(iter(known), None)
    if known == {State.PAIR, State.ZERO}:
        return State.PAIR
    if State.CONST in known and len(known) == 2 and State.MEAN not in known:
        other = next(iter(known - {State.CONST}))
        return State.ANY if other is State.ZERO else other
    return State.ANY
