"""One rule an operator; all of them meet in this table."""

from __future__ import annotations

from collections.abc import Mapping

from outgrow.reading import Rule
from outgrow.rules import (
    elementwise,
    experts,
    fold,
    fourier,
    gradient,
    graph,
    norm,
    product,
    quantise,
    recurrent,
    reduce,
    shape,
    sparse,
    written,
)

FAMILIES = (
    *(elementwise, shape, product, reduce, norm, fold),
    *(graph, sparse, experts, gradient, fourier, written, recurrent, quantise),
)
RULES: Mapping[str, Rule] = {name: rule for family in FAMILIES for name, rule in family.RULES.items()}
