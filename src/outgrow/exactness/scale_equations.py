"""Find the powers of C/C′ by which tensors are multiplied, so that no ε has to change: the writers of a stream pay.

A stream of C units grows to C′; its new units are zero (under an RMS norm) or the mean of the old ones (under a layer norm).
With k = √(C′/C), multiply all tensors that write the stream by k. Then

    mean of squares    k²·Σx²/C′ = Σx²/C      the statistics stay as they were, and so does every ε
    normalised units   k times the old ones   so γ is divided by k where a weight reads the result

In general each tensor is multiplied by some power of C/C′, which is unknown at first. Every operator gives an equation between
these powers: summands have equal ones, a statistic to which ε is added has the power 0, and so has the result of a weight that
reads the stream. For an embedding that is also the head, k·W reads the normalised units: γ of the norm before the head is
divided by k², and its β by k. A norm at the end of a branch (OLMo 2, Gemma 2) keeps its γ: its result writes the stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from outgrow.analysis.exponents import Exponent, Unknown
from outgrow.analysis.unit_states import Ratio, Refused, Rescale

ROUNDED = 2**-7  # two roundings to bfloat16


@dataclass(frozen=True)
class Payment:
    """A request that the writers pay; and factors that a library computes from the size, as exponents of C/C′.

    scalars: by the number of the operator that multiplies or divides by the scalar. tensors: by name; these can't be rescaled
    otherwise, since a file does not contain them (buffers that are not persistent). Each comes with the factor itself, which
    the library may have rounded.
    """

    scalars: tuple[tuple[int, Fraction], ...] = ()
    tensors: tuple[tuple[str, Fraction, float], ...] = ()


@dataclass
class ScaleEquations:
    """Equations between the exponents of tensors, and what is known of them so far.

    ranks: for each unknown, how much a change of its tensor is to be avoided (a larger number: rather not).
    """

    payment: Payment
    ranks: dict[Unknown, int] = field(default_factory=dict)
    solved: dict[Unknown, Exponent] = field(default_factory=dict)
    used: set[int | str] = field(default_factory=set)  # operators and tensors of the payment that the volume meets

    def __post_init__(self) -> None:
        self._scalars = dict(self.payment.scalars)
        self._tensors = {name: (exponent, factor) for name, exponent, factor in self.payment.tensors}

    def scalar(self, op: int) -> Fraction:
        """The exponent of the scalar by which an operator multiplies or divides."""
        self.used.add(op)
        return self._scalars.get(op, Fraction(0))

    def computed(self, name: str) -> Fraction | None:
        """The exponent of a tensor that the library computes; None for other tensors."""
        self.used.add(name)
        return self._tensors[name][0] if name in self._tensors else None

    def tensor(self, name: str, offset: float, rank: int) -> Exponent:
        """The exponent of a tensor: of the library's making, or unknown."""
        if (computed := self.computed(name)) is not None:
            return Exponent(computed)
        unknown = name, offset
        self.ranks[unknown] = min(rank, self.ranks.get(unknown, rank))
        return Exponent.of(unknown)

    def must_be_zero(self, exponent: Exponent, reason: str) -> None:
        """Add an equation; refused with the reason if no powers satisfy it together with the earlier ones."""
        left = self.reduced(exponent)
        if not left.terms:
            if left.constant:
                raise Refused(reason)
            return
        pivot, coefficient = min(left.terms, key=lambda term: (self.ranks[term[0]], term[0]))
        rest = Exponent(left.constant, tuple(term for term in left.terms if term[0] != pivot))
        self.solved[pivot] = rest * (-1 / coefficient)

    def reduced(self, exponent: Exponent) -> Exponent:
        """An exponent without the unknowns that are known in terms of others."""
        while any(unknown in self.solved for unknown, _ in exponent.terms):
            exponent = exponent.with_values(self.solved)
        return exponent

    def rescales(self, ratio: Ratio) -> list[Rescale]:
        """The tensors that are rescaled; unknowns that no equation determines are zero."""
        found = [Rescale(key[0], ratio, self.reduced(Exponent.of(key)).constant, key[1]) for key in self.solved]
        computed = {name: self._tensors[name] for name in self._tensors if name in self.used}
        found += [Rescale(name, ratio, exponent, factor=factor) for name, (exponent, factor) in computed.items()]
        found = [rescale for rescale in found if rescale.exponent]
        twice = [one.tensor for one in found if sum(one.tensor == other.tensor for other in found) > 1]
        if twice:
            raise Refused(f"{twice[0]} is used both as it is and with a constant added, and would have to be rescaled for both")
        return found

    def scalars(self) -> dict[int, Fraction]:
        """The operators that the volume meets and whose factor the library changes."""
        return {op: exponent for op, exponent in self._scalars.items() if op in self.used}


def simple_power(before: float, after: float, ratio: float) -> Fraction | None:
    """The exponent e with after/before = ratio ** e, if it is a multiple of 1/2 up to rounding; otherwise None."""
    if before == after:
        return Fraction(0)
    if before * after <= 0 or ratio == 1:
        return None
    nearest = Fraction(round(2 * math.log(after / before) / math.log(ratio)), 2)
    return nearest if math.isclose(after, before * ratio ** float(nearest), rel_tol=ROUNDED) else None
