"""One rule an operator; all of them meet in this table."""

from __future__ import annotations

from collections.abc import Mapping

from outgrow.reading import Rule
from outgrow.rules import elementwise, fold, norm, product, reduce, shape

RULES: Mapping[str, Rule] = {**elementwise.RULES, **shape.RULES, **product.RULES, **reduce.RULES, **norm.RULES, **fold.RULES}
