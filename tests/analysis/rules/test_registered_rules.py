"""`outgrow.rule`: registrations that are refused, and those that replace another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outgrow
import tests.helpers.custom_operators  # noqa: F401  (registers ruletest::act and others)
from outgrow.errors import RuleError
from outgrow.model.reference_operators import REFERENCES


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), "names of operators"),
        ((3,), "names of operators"),
        (("act",), "write namespace::name"),
        (("ruletest.act",), "'ruletest::act', for all its overloads"),
        (("aten::add.Tensor",), "'aten::add', for all its overloads"),
        (("ruletest::atc",), r"there is no operator ruletest::atc \(did you mean 'ruletest::act'\?\)"),
        (("aten::gelu",), "outgrow has a rule for aten::gelu of its own"),
        (("aten::relu_",), "outgrow has a rule for aten::relu_ of its own"),
        (("ruletest::parts",), "needs no rule: it is made of other operators"),
        (("ruletest::act", "ruletest::atc"), "there is no operator"),
    ],
)
def test_registrations_that_make_no_sense_are_refused(names: Any, expected: str) -> None:
    before = dict(REFERENCES)
    with pytest.raises(RuleError, match=expected):
        outgrow.rule(*names, like=torch.relu)
    assert before == REFERENCES


def test_registering_twice_needs_replace() -> None:
    outgrow.rule("ruletest::act", "ruletest::same", like=torch.relu)
    with pytest.raises(RuleError, match=r"has a rule already, torch.*relu: .*replace=True"):
        outgrow.rule("ruletest::act", like=torch.tanh)
    outgrow.rule("ruletest::act", like=torch.tanh, replace=True)
    assert REFERENCES["ruletest.act"].function is torch.tanh
    with pytest.raises(RuleError, match="is no function"):
        outgrow.rule("ruletest::act", replace=True)("tanh")  # type: ignore[type-var]
