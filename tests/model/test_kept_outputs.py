"""`outputs=` names what a growth preserves: other outputs of the model may change their size."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import SelectionError
from outgrow.runs.schedule_files import from_dict, to_dict
from tests.helpers.judging import distance
from tests.helpers.random_weights import randomise_parameters


class Pair(NamedTuple):
    logits: Tensor
    states: Tensor


class Returned:
    """An output with attributes."""

    def __init__(self, logits: Tensor, states: Tensor) -> None:
        self.logits, self.states, self.loss = logits, states, None


FORMS: dict[str, tuple[Any, str | int]] = {
    "dict": (lambda logits, states: {"logits": logits, "states": states}, "logits"),
    "tuple": (lambda logits, states: (logits, states), 0),
    "named tuple": (Pair, "logits"),
    "attributes": (Returned, "logits"),
    "nested": (lambda logits, states: {"scores": {"text": [logits]}, "states": states}, "scores.text.0"),
}


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.enter, self.norm, self.out, self.form = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2), FORMS[form][0]

    def logits(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.enter(x)))

    def forward(self, x: Tensor) -> Any:
        return self.form(self.logits(x), self.enter(x))


X, FRESH = (torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


@pytest.mark.parametrize("form", FORMS)
def test_other_outputs_may_change_their_size(form: str) -> None:
    model = randomise_parameters(Model(form).double())
    with pytest.raises(outgrow.GrowthError, match=r"it is an output of the model[^$]*outputs="):
        outgrow.widen(model, X, "enter", to=12)
    with torch.no_grad():
        before = model.logits(FRESH)
        growth = outgrow.widen(model, X, "enter", to=12, outputs=FORMS[form][1])
        assert distance(before, model.logits(FRESH)) < 1e-13
    assert model.enter.out_features == 12
    note = next(note for note in growth.notes if note.startswith("outputs: "))
    assert f"outputs: {FORMS[form][1]} preserved; not compared: " in note
    assert "(4, 8) → (4, 12)" in note


def test_volumes_are_listed_for_the_outputs_that_matter() -> None:
    model = Model("dict")
    plain, kept = (outgrow.volumes(model, X.float(), outputs=outputs)[0] for outputs in (None, "logits"))
    assert not plain.growable
    assert "mean" in kept.methods


def test_a_named_output_that_changes_is_found() -> None:
    """A method that changes outputs is reported with the change of the named output alone."""
    model = randomise_parameters(Model("dict").double())
    growth = outgrow.widen(model, X, "enter", to=12, outputs="logits", method="random")
    assert not growth.preserving
    assert 0 < growth.max_error < float("inf")


def test_several_requests_preserve_all_outputs_that_they_name() -> None:
    model = Model("dict")
    before = copy.deepcopy(model.state_dict())
    requests = [outgrow.Widen("enter", to=12, outputs=name) for name in ("logits", "states")]
    with pytest.raises(outgrow.GrowthError, match="it is an output of the model"):
        outgrow.grow(model, X.float(), *requests)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("outputs", ["logit", 3, "logits.0", ["logits", "other"]])
def test_an_output_that_is_not_there_is_refused_with_the_names(outputs: Any) -> None:
    with pytest.raises(SelectionError, match="returns no such output"):
        outgrow.widen(Model("dict"), X.float(), "enter", to=12, outputs=outputs)


@pytest.mark.parametrize("outputs", ["", [], True, [1.5], {}])
def test_outputs_are_named_by_keys_and_positions(outputs: Any) -> None:
    with pytest.raises(SelectionError, match=r"e\.g\. outputs='logits'"):
        outgrow.Widen("enter", to=12, outputs=outputs)


def test_schedule_files_name_outputs() -> None:
    schedule = outgrow.Schedule([outgrow.At(step=1, grow=[outgrow.Widen("*", to=12, outputs=["logits", 0])])])
    data = to_dict(schedule)
    assert data["growth"][0]["grow"] == [{"widen": "*", "to": 12, "outputs": ["logits", 0]}]
    assert from_dict(data) == schedule
