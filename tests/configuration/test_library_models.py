"""Growths of many Transformers families: what the report says of the configuration is what the library does.

A report that says nothing means that `save_pretrained` and `from_pretrained` bring back a model with the same tensors that
computes the same, also with other weights: new blocks are the identity at first, which would hide that one is of another kind.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.configuration.explain_differences import NOT_UPDATED
from outgrow.modules.gates import without_gates
from tests.helpers.judging import distance
from tests.helpers.library_models import FAMILIES, Family, shaken

pytest.importorskip("transformers")

QUICK = {"gemma2", "opt", "pegasus", "clip"}


def growths(family: Family) -> list[Any]:
    behind = [outgrow.Deepen(after=path, fade=fade) for path in family.depth for fade in (None, 3)]
    return [*(outgrow.Widen(where, factor=2) for where in (family.mlp, family.width, "*")), *behind]


CASES = [
    pytest.param(family, growth, id=f"{family}: {growth}", marks=[] if str(family) in QUICK else [pytest.mark.exhaustive])
    for family in FAMILIES
    for growth in growths(family)
]


def scores(model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    output = model(**example)
    return output.logits if hasattr(output, "logits") else output.logits_per_image


def reloads(model: nn.Module, example: dict[str, Tensor], folder: Path) -> bool:
    """Whether the library saves and loads a model with the same outputs, with its own weights and with others."""
    without_gates(model)
    model.save_pretrained(folder)
    try:
        again, problems = type(model).from_pretrained(folder, output_loading_info=True)
        if any(problems.values()):
            return False
        pairs = [(scores(one.eval(), example), scores(shaken(one, 7), example)) for one in (model, again)]
    except Exception:
        return False
    return all(distance(one, other) < 1e-4 for one, other in zip(*pairs, strict=True))


@pytest.mark.parametrize(("family", "growth"), CASES)
def test_the_report_says_whether_the_library_loads_what_has_grown(family: Family, growth: Any, tmp_path: Path) -> None:
    model, example = family.build(), family.example()
    length = 5 if family.inputs == "sound" else 20
    other = family.example(seed=7, batch=3, length=length)
    before = scores(model, other).detach()
    config, weights = copy.deepcopy(model.config.to_dict()), copy.deepcopy(model.state_dict())
    try:
        report = outgrow.grow(model, example, growth)
    except outgrow.GrowthError:
        assert model.config.to_dict() == config
        assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {n: t.shape for n, t in weights.items()}
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
        return
    assert distance(before, scores(model, other).detach()) < 1e-4
    scores(model, example).square().sum().backward()
    new = tuple(f"{path}." for path in report.plan.new_blocks)
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if name.startswith(new or " "))
    model.zero_grad()
    with torch.no_grad():
        assert reloads(model, other, tmp_path) == (NOT_UPDATED not in str(report)), str(report)
