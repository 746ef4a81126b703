"""Plan a deepening: behind one module, or of a whole stack."""

from __future__ import annotations

from outgrow.requests import Deepen
from outgrow.transforms.deepen.own_kind import plans_behind
from outgrow.transforms.deepen.whole_stack import stack_plans
from outgrow.transforms.site_and_step import Site, Step


def deepen_plans(site: Site, request: Deepen) -> Step:
    """The plans that put new modules into the model, with their starting values."""
    return plans_behind(site, request) if request.after else stack_plans(site, request)
