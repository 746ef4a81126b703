"""Mixtures of experts of Transformers, whose experts run as one grouped product by default."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import dissect
from outgrow.model.meta_copy import CachedShapes
from outgrow.transforms.widen.expert_sizes import NOTE
from tests.helpers.grow_everywhere import reasons
from tests.helpers.judging import assert_same_function

transformers = pytest.importorskip("transformers")

grouped = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")

SMALL: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, tuple[dict[str, Any], str]] = {  # options, and the setting that holds the experts' size
    "Mixtral": ({"num_local_experts": 4, "intermediate_size": 12}, "intermediate_size"),
    "Qwen3Moe": ({"num_experts": 4, "moe_intermediate_size": 12, "intermediate_size": 20}, "moe_intermediate_size"),
    "Olmoe": ({"num_experts": 4, "intermediate_size": 12}, "intermediate_size"),
}


class Logits(nn.Module):
    """The outputs that are compared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids).logits


def build(name: str, **more: Any) -> nn.Module:
    options, _ = EXPERTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():  # buffers hold frequencies, which the configuration gives
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def judged(model: nn.Module) -> nn.Module:
    """A copy in float64 whose experts run one by one: torch has no grouped product in float64."""
    twin = copy.deepcopy(model)
    twin.config._experts_implementation = "eager"
    return Logits(twin.double())


@grouped
@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph", "mean"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_grow_exactly_in_their_default_form(name: str, method: str) -> None:
    model, ids = build(name), torch.arange(14).view(2, 7) % 30
    assert any("_grouped_mm" in op.name for op in dissect(model, ids).reading.trace.ops)
    before = judged(model)
    growth = outgrow.widen(model, {"input_ids": ids}, "*.mlp.experts", factor=2, method=method)
    assert growth.flops[1] > growth.flops[0]
    assert getattr(model.config, EXPERTS[name][1]) == 24
    assert model.model.layers[1].mlp.experts.down_proj.shape == (4, 16, 24)
    assert_same_function(before, judged(model), [ids, (ids * 7 + 3) % 30])


def test_the_number_of_experts_stays() -> None:
    found = reasons(build("Mixtral"), {"input_ids": torch.arange(14).view(2, 7)})
    assert "experts are chosen by data (model.layers.0.mlp.experts)" in found.values()


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_copy_their_weights_for_each_row_grow_as_eager_ones(name: str) -> None:
    """Of "batched_mm", which looks up weights by index: the same plan, and the same outputs. Norms compute in float32."""
    ids = torch.arange(14).view(2, 7) % 30
    models = {form: build(name, experts_implementation=form).double() for form in ("eager", "batched_mm")}
    before = Logits(models["eager"])(ids)
    plans = [str(outgrow.widen(model, {"input_ids": ids}, "*", factor=2).plan) for model in models.values()]
    assert plans[0] == plans[1]
    assert models["batched_mm"].model.layers[1].mlp.experts.down_proj.shape == (4, 32, 24)
    torch.testing.assert_close(Logits(models["batched_mm"])(ids), before, rtol=1e-5, atol=1e-5)
    assert_same_function(*(Logits(model) for model in models.values()), [ids, (ids * 7 + 3) % 30])


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_analysed_without_values(name: str) -> None:
    """On the meta device, where torch describes the grouped product in bfloat16 only."""
    model, ids = build(name), torch.arange(14).view(2, 7) % 30
    twin = copy.deepcopy(model).to("meta")
    found = [[(one.name, one.kind, one.size) for one in outgrow.volumes(each, {"input_ids": ids})] for each in (model, twin)]
    assert found[0] == found[1]


@grouped
@pytest.mark.parametrize(("dtype", "by", "fits"), [(torch.float32, 3, 16), (torch.bfloat16, 4, 24), (torch.float32, 4, None)])
def test_sizes_that_the_default_form_does_not_take_are_reported(
    dtype: torch.dtype, by: int, fits: int | None, tmp_path: Path
) -> None:
    """Experts that run one by one can have any size; loaded in their default form, the saved model fails."""
    options, setting = EXPERTS["Qwen3Moe"]
    model = build("Qwen3Moe", experts_implementation="eager", **{setting: options[setting] + (4 if fits == 24 else 0)}).to(
        dtype
    )
    ids = torch.arange(14).view(2, 7) % 30
    growth = outgrow.widen(model, {"input_ids": ids}, kind="mlp", by=by)
    model.save_pretrained(tmp_path)
    for form in ("eager", None, "batched_mm"):
        again = Logits(type(model).from_pretrained(tmp_path, dtype=dtype, experts_implementation=form))
        if form is None and fits is not None:
            with pytest.raises(RuntimeError, match="16 bytes"):
                again(ids)
        else:
            torch.testing.assert_close(again(ids), Logits(model)(ids), rtol=0.1, atol=0.1)
    told = [note for note in growth.notes if note.startswith(NOTE)]
    assert len(told) == (fits is not None)
    assert all(f"or grow with to={fits}" in note for note in told)


@grouped
def test_a_refused_size_of_experts_names_one_that_runs() -> None:
    ids = torch.arange(14).view(2, 7) % 30
    with pytest.raises(outgrow.GrowthError, match=r"multiples of 4 \(16 instead of 15\)"):
        outgrow.widen(build("Qwen3Moe"), {"input_ids": ids}, kind="mlp", by=3)


@grouped
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_grouped_product_has_the_geometry_of_its_kernel(dtype: torch.dtype, transposed: bool) -> None:
    offsets = torch.tensor([1, 5], dtype=torch.int32)
    for inner, outer in itertools.product((1, 4, 6, 8), repeat=2):
        x, weight = torch.ones(5, inner, dtype=dtype), torch.ones(2, outer, inner, dtype=dtype).mT
        weight = weight if transposed else weight.contiguous()
        results: list[Any] = []
        for device in ("cpu", "meta"):
            try:
                with CachedShapes():
                    result = torch._grouped_mm(x.to(device), weight.to(device), offs=offsets.to(device))
                results.append((result.shape, result.stride(), result.dtype))
            except RuntimeError as error:
                results.append("16 bytes" in str(error) and "refused")
        assert results[0] == results[1]
        assert results[0]
