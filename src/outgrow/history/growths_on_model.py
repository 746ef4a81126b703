"""The growths that a model has been through, stored on the model itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outgrow.growth_plan.plan import Plan

ATTRIBUTE = "_outgrow_history"


def history(model: nn.Module) -> tuple[Plan, ...]:
    """The plans of all growths so far, oldest first."""
    return tuple(vars(model).get(ATTRIBUTE, ()))


def remember(model: nn.Module, plan: Plan) -> None:
    """Add a plan to the model's history."""
    vars(model)[ATTRIBUTE] = (*history(model), plan)


def growths(plans: Sequence[Plan]) -> list[tuple[Plan, ...]]:
    """The plans of a history, grouped by growth."""
    found: list[tuple[Plan, ...]] = []
    for plan in plans:
        if plan.continues and found:
            found[-1] += (plan,)
        else:
            found.append((plan,))
    return found
