"""The table of all rules, one per operator."""

from __future__ import annotations

from collections.abc import Mapping

from outgrow.analysis.interpret_trace import Rule
from outgrow.analysis.rules import (
    elementwise,
    experts,
    folded_residual,
    fourier,
    gradient,
    norm,
    product,
    quantise,
    recurrent,
    reduce,
    sampling,
    shape,
    sparse,
)
from outgrow.analysis.rules import graph_messages as graph
from outgrow.analysis.rules import partial_write as written

FAMILIES = (
    *(elementwise, shape, product, reduce, norm, folded_residual),
    *(graph, sparse, experts, gradient, fourier, written, recurrent, quantise, sampling),
)
RULES: Mapping[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}
