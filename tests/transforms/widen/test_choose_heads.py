"""Query heads that share keys and values: whole groups are added, or query heads to each group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import SelectionError, SizeError
from tests.helpers.library_models import FAMILIES
from tests.helpers.random_weights import randomise_parameters

BY_NAME = {str(family): family for family in FAMILIES}
SIZES = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}  # three query heads per key head

NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}


def llama(**options: Any) -> nn.Module:
    family = BY_NAME["llama"]
    return replace(family, options={**family.options, **SIZES, **options}).build()


def example() -> dict[str, torch.Tensor]:
    return BY_NAME["llama"].example()


def logits(model: nn.Module) -> torch.Tensor:
    return model(**BY_NAME["llama"].example(seed=5)).logits.detach()


@pytest.mark.parametrize(
    ("request_", "heads", "keys"),
    [
        ({"by": 2}, 8, 2),  # no whole group: one more query head for each of the two key heads
        ({"by": 3}, 9, 3),
        ({"by": 6}, 12, 4),  # both forms reach it: groups come first
        ({"by": 6, "unit": "query"}, 12, 2),
        ({"to": 10}, 10, 2),
        ({"factor": 4 / 3}, 8, 2),
        ({"factor": 1.5, "unit": "group"}, 9, 3),
    ],
)
def test_sizes_count_query_heads(request_: dict[str, Any], heads: int, keys: int) -> None:
    model = llama(hidden_size=24 if heads != 9 else 36, num_attention_heads=6)
    before = logits(model)
    outgrow.grow(model, example(), outgrow.Widen(kind="heads", **request_))
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.out_features == attention.o_proj.in_features == heads * 4
    assert attention.k_proj.out_features == attention.v_proj.out_features == keys * 4
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("unit", "keys"), [(None, 3), ("group", 3), ("query", 2)])
def test_layers_without_a_rotary_encoding_grow_as_those_with_one(unit: Any, keys: int) -> None:
    """Cohere2 has one in every second layer only; all layers add the same unit, so that the configuration follows."""
    family = BY_NAME["cohere2"]
    model = family.build()
    before = logits(model)
    growth = outgrow.widen(model, family.example(), kind="heads", factor=1.5, unit=unit)
    assert len(growth.plan.changes) == len(model.model.layers)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (6, keys)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_batches_with_padding_run_although_the_example_has_none() -> None:
    """One layer alone, which no configuration describes; without a mask, torch's kernel repeats the keys by itself."""
    model = llama()
    ids = example()["input_ids"]
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)}
    before = model(**padded).logits.detach()
    outgrow.grow(model, {"input_ids": ids}, outgrow.Widen("model.layers.0.*", kind="heads", by=2, unit="query"))
    assert model.model.layers[0].self_attn.num_key_value_groups == 4
    torch.testing.assert_close(model(**padded).logits[:, 1:], before[:, 1:], rtol=1e-4, atol=1e-5)


def test_new_query_heads_follow_those_of_their_group() -> None:
    model = llama()
    old = model.model.layers[0].self_attn.q_proj.weight.detach().clone().view(2, 3, 4, -1)
    outgrow.grow(model, example(), outgrow.Widen(kind="heads", by=2))
    new = model.model.layers[0].self_attn.q_proj.weight.detach().view(2, 4, 4, -1)  # key head, query head, feature
    assert torch.equal(new[:, :3], old)
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (8, 2)


@pytest.mark.parametrize(("by", "near"), [(1, "number is 8"), (5, "numbers are 10 and 12")])
def test_impossible_numbers_are_refused_with_the_possible_ones(by: int, near: str) -> None:
    with pytest.raises(SizeError) as refusal:
        outgrow.grow(llama(), example(), outgrow.Widen(kind="heads", by=by))
    assert f"from 6 to {6 + by} query heads" in str(refusal.value)
    assert "add 3 at a time (unit='group'), query heads in each group add 2 at a time (unit='query')" in str(refusal.value)
    assert str(refusal.value).endswith(f"the nearest possible {near}")


def test_a_unit_says_what_it_adds() -> None:
    volumes = [volume for volume in outgrow.volumes(llama(), example()) if volume.kind == "heads"]
    found = {(volume.size, volume.form, volume.unit) for volume in volumes}
    assert found == {
        (6, "group", "3 query heads with the key and value head that they share"),
        (6, "query", "2 query heads, one for each key and value head"),
    }


def test_all_query_heads_may_share_one_key_head() -> None:
    model = llama(num_key_value_heads=1)
    before = logits(model)
    outgrow.grow(model, example(), outgrow.Widen(kind="heads", by=2))
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (8, 1)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_heads_with_keys_of_their_own_have_no_groups_to_add_to() -> None:
    model = llama(num_key_value_heads=6)
    with pytest.raises(SelectionError, match=r"no volume of kind 'heads' grows by query heads in each group(.|\n)*leave unit="):
        outgrow.grow(model, example(), outgrow.Widen(kind="heads", by=2, unit="query"))
    outgrow.grow(model, example(), outgrow.Widen(kind="heads", by=2, unit="group"))
    assert model.config.num_key_value_heads == 8


@pytest.mark.parametrize("options", [{"kind": "mlp", "unit": "query"}, {"unit": "group"}, {"kind": "heads", "unit": "head"}])
def test_other_units_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SelectionError, match="unit='group'"):
        outgrow.Widen(by=2, **options)


def test_a_schedule_keeps_the_unit() -> None:
    schedule = outgrow.Schedule([outgrow.At(step=1, grow=[outgrow.Widen(kind="heads", by=2, unit="query")])])
    assert outgrow.Schedule.from_dict(schedule.to_dict()) == schedule
    assert str(schedule) == "step 1: Widen heads (query) '*' by 2"


@pytest.mark.parametrize(
    ("name", "options", "unit", "says"),
    [
        ("falcon", {}, None, {"num_attention_heads": 8, "hidden_size": 32}),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            "group",
            {"num_attention_heads": 8, "num_kv_heads": 4},
        ),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            "query",
            {"num_attention_heads": 8, "num_kv_heads": 2},
        ),
        ("falcon", {"multi_query": False}, None, {"num_attention_heads": 8}),
        ("phi3", {}, "query", {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("deepseekv3", {}, None, {"num_attention_heads": 8, "num_key_value_heads": 8}),
    ],
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_and_compressed_projections_grow(
    name: str, options: dict[str, Any], unit: str | None, says: dict[str, int], attention: str
) -> None:
    family = replace(BY_NAME[name], options={**BY_NAME[name].options, **options, "attn_implementation": attention})
    model: Any = randomise_parameters(family.build()).eval()
    width = [outgrow.Widen(kind="width", factor=2)] if name == "falcon" else []  # its heads have the width between them
    before = model(**family.example(seed=5)).logits.detach()
    outgrow.grow(model, family.example(), outgrow.Widen(kind="heads", factor=2, unit=unit), *width)
    assert {field: getattr(model.config, field) for field in says} == says
    rebuilt: Any = type(model)(model.config).eval()
    rebuilt.load_state_dict(model.state_dict())
    for grown in (model, rebuilt):
        torch.testing.assert_close(grown(**family.example(seed=5)).logits, before, rtol=1e-3, atol=1e-4)
