"""Check that a model's parameters can be shared by several sizes, and that each size still computes the same."""

from __future__ import annotations

import operator
from typing import Any

from outgrow.errors import GrowthError, Problem, VerifyError
from outgrow.families.member import Member
from outgrow.model.check_arguments import check_model
from outgrow.model.dtensor import is_dtensor
from outgrow.model.example import Example
from outgrow.model.unwrap import bare
from outgrow.verify import outputs as verify


def check_shareable(model: Any) -> None:
    """Raise if a model's parameters can't be shared by several sizes."""
    check_model(model)
    if bare(model) is not model:
        raise GrowthError(
            f"the model is wrapped in {type(model).__name__}: pass the module inside, {type(bare(model)).__name__}"
        )
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise GrowthError("the model's parameters are sharded, and members can't take parts of them: make the family before")


def position_of(number: Any, count: int) -> int:
    """The position of the member of a number, in a family of so many; negative numbers count from the largest."""
    try:
        return range(count)[operator.index(number)]
    except (TypeError, IndexError) as error:
        raise type(error)(f"there is no member {number!r}: the family has {count} members, from 0 to {count - 1}") from None


def outputs_of(member: Member, example: Example) -> verify.Outputs:
    """The outputs of a member on the example, in eval mode."""
    with member.fixed() as module:
        return verify.before(module, example, brief=True)


def check_outputs(member: Member, example: Example, base: verify.Outputs, number: int) -> None:
    """Raise if a member does not compute what it did before a growth of the shared parameters."""
    try:
        with member.fixed() as module:
            verify.check(module, example, base, preserving=True)
    except GrowthError as error:
        reason = (
            f"its code uses modules or tensors other than its own, as a function that refers to the model does ({error!s:.300})"
        )
        raise VerifyError(
            f"member {number} does not compute the same with its part of the grown parameters; everything was put back",
            [Problem("", reason, "let its code use only modules and tensors that are registered with self")],
        ) from error
