"""Copies of a stream whose embedding is also the head: one tensor writes the copies and reads them.

    logits = E · norm(x),   x = E[token] + …,   all C units copied, so that there are C′ = k·C

As a writer, E holds each column k times. As a reader it would hold parts of columns that add up to the old one, which are other
values. If it keeps whole copies, the head adds up k times what it did. The norm before the head compensates that: its γ and β
are divided by k. They are found by the equations of `exactness/scale_equations.py`: the result of a weight that reads C′ whole
copies is (C/C′)⁻¹ times the old one, and must not be. Readers other than E share the copies out as usual.
"""

from __future__ import annotations

from fractions import Fraction

from outgrow.analysis.effects import Contract, Operand
from outgrow.analysis.exponents import NONE, Exponent
from outgrow.analysis.roles import WRITES
from outgrow.analysis.unit_states import Refused, State
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.exactness.carried_units import Findings
from outgrow.exactness.scale_equations import Payment

Keys = set[tuple[str, int]]


class TiedReader(Refused):
    """A tensor both writes and reads new units, and the two need different values."""


def written_by(volume: Volume) -> frozenset[tuple[str, int]]:
    """The tensors and axes that write a volume."""
    return frozenset((slot.tensor, slot.axis) for slot in volume.slots if slot.role == WRITES)


def parameters_only(anatomy: Anatomy) -> Payment:
    """A request in which only parameters are rescaled: a library may compute buffers, and not save them."""
    return Payment(tensors=tuple((name, Fraction(0), 1.0) for name in sorted(anatomy.buffers)))


def read_whole(findings: Findings, effect: Contract, reader: Operand, keys: Keys, state: State | None) -> bool:
    """Whether a weight reads whole copies, since it also writes them; raises if it reads other units beside them."""
    tied = findings.tied & keys
    if not tied or state is not State.COPY:
        return False
    columns = [block for block in reader.layout if set(block.axes) & effect.contracted]
    mixed = any((findings.places.ids(block.labels) < 0).any() for block in columns)
    if keys - tied or mixed:
        raise Refused(f"{min(tied)[0]} both writes and reads it (a tied parameter), together with other tensors or units")
    findings.verdict.multiples = True
    findings.verdict.tied = min(tied)[0]
    return True


def extra_exponent(whole: bool) -> Exponent:
    """The factor on a sum over whole copies, as an exponent of C/C′."""
    return Exponent(Fraction(-1)) if whole else NONE
