"""Exponents of C/C′ that depend on unknowns: the power by which each tensor of a model will be multiplied.

A volume grows from C to C′ units, and every value of the forward pass is multiplied by some power of C/C′. Where tensors may be
rescaled, such a power is a linear form: a constant, plus a multiple of the unknown exponent of each tensor on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

Unknown = tuple[str, float]  # a tensor, and the constant that is added to it where it is used (as in 1 + w)
Terms = tuple[tuple[Unknown, Fraction], ...]


@dataclass(frozen=True)
class Exponent:
    """A constant plus multiples of unknowns; it is false if it is zero whatever the unknowns are.

    Example:
        >>> weight = Exponent.of(("weight", 0.0))
        >>> bool(weight - weight), (2 * weight + 1).constant
        (False, Fraction(1, 1))
    """

    constant: Fraction = Fraction(0)
    terms: Terms = ()  # sorted by unknown; no coefficient is zero

    @staticmethod
    def of(unknown: Unknown) -> Exponent:
        return Exponent(terms=((unknown, Fraction(1)),))

    def __bool__(self) -> bool:
        return bool(self.constant or self.terms)

    def __add__(self, other: Exponent | Fraction | int) -> Exponent:
        if not isinstance(other, Exponent):
            return Exponent(self.constant + other, self.terms)
        if not self.terms or not other.terms:
            return Exponent(self.constant + other.constant, self.terms or other.terms)
        sums = dict(self.terms)
        for unknown, coefficient in other.terms:
            sums[unknown] = sums.get(unknown, Fraction(0)) + coefficient
        return Exponent(self.constant + other.constant, tuple(sorted((u, c) for u, c in sums.items() if c)))

    def __mul__(self, factor: Fraction | int) -> Exponent:
        if not factor:
            return Exponent()
        return Exponent(self.constant * factor, tuple((unknown, c * factor) for unknown, c in self.terms))

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Exponent) -> Exponent:
        return self + other * -1

    def with_values(self, values: dict[Unknown, Exponent]) -> Exponent:
        """The exponent with some unknowns replaced by what is known of them."""
        result = Exponent(self.constant, tuple((u, c) for u, c in self.terms if u not in values))
        for unknown, coefficient in self.terms:
            if unknown in values:
                result = result + values[unknown] * coefficient
        return result


NONE = Exponent()
