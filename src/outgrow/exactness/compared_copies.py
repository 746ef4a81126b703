"""Copies of units over which norms and products of activations run: embeddings that are compared by cosine similarity.

    s = Σ over u of x[u]/‖x‖ · y[u]/‖y‖,   all C units copied, so that there are C′ = k·C

‖x‖ becomes √k times as large, so that x/‖x‖ is divided by √k, and the sum over k times as many products is the old one. If the
norm is compared with an ε (`torch.nn.functional.normalize`), what writes x is divided by √k, and the norm stays. Both follow
from the equations of `exactness/scale_equations.py`: a norm over whole copies is (C/C′)^(−1/2) times the old one, a sum
(C/C′)^(−1) times. Products of activations are allowed where norms determine the scales of both factors, and not in attention:
the size of a head may also set the scale of its scores.
"""

from __future__ import annotations

from fractions import Fraction

from outgrow.analysis.effects import Contract, Reduce
from outgrow.analysis.exponents import Exponent
from outgrow.analysis.unit_states import Carried, Refused, State
from outgrow.exactness.carried_units import Findings

POWERS = {"sum": Fraction(-1), "norm": Fraction(-1, 2)}  # of C/C′, on a statistic over whole copies


class Summed(Refused):
    """A norm, a sum or a product of activations runs over copies: exact at most if tensors may be rescaled."""


def summed_copies(findings: Findings, effect: Reduce, x: Carried, refusal: str) -> Carried:
    """A sum or a norm over whole copies."""
    if findings.equations is None:
        raise Summed(refusal)
    findings.copied_whole(findings.reading.layouts[effect.input], effect.axes)
    findings.verdict.compared = findings.place
    return Carried(None, x.exponent + POWERS[effect.how], findings.ratio)


def compared_copies(findings: Findings, effect: Contract, a: Carried, b: Carried, refusal: str) -> Exponent:
    """A product of two activations that sums over whole copies: the factor on its result beside those of both."""
    if findings.places.volume.kind in ("heads", "head_dim") or not a.state is b.state is State.COPY:
        raise Refused(refusal)
    if findings.equations is None:
        raise Summed(refusal)
    if any(findings.equations.reduced(side.exponent).terms for side in (a, b)):
        raise Refused(refusal)
    for side in (effect.left, effect.right):
        findings.copied_whole(side.layout, effect.contracted)
    findings.verdict.compared = findings.place
    return Exponent(POWERS["sum"])
