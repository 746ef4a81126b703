"""A plan is read from JSON exactly: values, types, and the sign of zero."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outgrow
from outgrow.apply import fills
from outgrow.errors import CheckpointError
from outgrow.growth_plan.plan import FILL_NAMES, Change, Insertion, Plan, Rescaling, Setting

numbers = st.integers(-(2**70), 2**70) | st.integers(-3, 3)
reals = st.floats(allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1 / 3])
ranges = st.builds(lambda a, b, c: tuple(range(a, a + b * c, c)), st.integers(0, 99), st.integers(0, 99), st.integers(1, 5))
positions = (
    ranges | st.lists(st.integers(0, 9)).map(tuple) | st.lists(numbers).map(tuple) | st.lists(numbers | reals).map(tuple)
)
factors = st.lists(reals).map(tuple) | st.builds(lambda value, count: (value,) * count, reals, st.integers(0, 9))
names = st.text(max_size=5)
values = st.recursive(
    st.none() | st.booleans() | numbers | reals | names,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["list", "dict"]), inner, max_size=3)
    ),
    max_leaves=6,
)
insertions = st.builds(
    Insertion,
    tensor=names,
    axis=st.integers(0, 4),
    size=st.integers(0, 100),
    at=positions,
    sources=positions,
    fill=st.sampled_from(FILL_NAMES),
    draws=positions,
    signs=factors,
    members=positions,
    weights=names,
    keep=factors,
    gradient=factors,
    gradient_keep=factors,
    init=names,
    noise=reals | st.just(0),
)
plans = st.builds(
    Plan,
    st.lists(st.builds(Change, names, numbers, numbers, names, st.booleans()), max_size=2).map(tuple),
    st.lists(insertions | st.builds(Rescaling, names, reals), max_size=3).map(tuple),
    st.lists(st.builds(Setting, names, names, values, values, st.none() | st.integers(0, 3) | names), max_size=3).map(tuple),
    numbers,
)


@settings(max_examples=300, deadline=None)
@given(plans)
def test_a_plan_is_read_from_json_exactly(plan: Plan) -> None:
    back = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert back == plan
    assert repr(back) == repr(plan)  # distinguishes 1, 1.0 and True; 0.0 and −0.0; tuples and lists


def test_the_json_of_a_range_is_short() -> None:
    edit = Insertion("weight", 0, 4096, tuple(range(4096, 8192)), tuple(range(4096)), "free", signs=(1.0,) * 4096)
    assert len(json.dumps(Plan((), (edit,)).to_json())) < 300


def test_a_setting_that_json_can_not_represent_is_refused_at_once(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    vars(model)["_outgrow_history"] = (Plan((), (), (Setting("", "bias", None, torch.zeros(2)),)),)
    with pytest.raises(CheckpointError, match="Tensor can't be written as JSON"):
        outgrow.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_table_of_fills_has_every_fill_of_a_plan() -> None:
    assert tuple(fills.FILLS) == FILL_NAMES


def test_a_fill_that_does_not_exist_is_refused_where_the_plan_is_read() -> None:
    plan = Plan((), (Insertion("weight", 0, 2, (2,), (1,), "copy", signs=(1.0,)),)).to_json()
    plan["edits"][0]["fill"] = "magic"
    with pytest.raises(ValueError, match="new entries of weight have the unknown fill 'magic'; known: free, zero"):
        Plan.from_json(plan)
