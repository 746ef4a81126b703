"""The growths that a model has been through, kept on the model itself."""

from __future__ import annotations

from torch import nn

from outgrow.plan import Plan

ATTRIBUTE = "_outgrow_history"


def history(model: nn.Module) -> tuple[Plan, ...]:
    """The plans of all growths so far, oldest first."""
    return tuple(vars(model).get(ATTRIBUTE, ()))


def remember(model: nn.Module, plan: Plan) -> None:
    vars(model)[ATTRIBUTE] = (*history(model), plan)
