"""Mixtures of experts of Transformers, whose experts run as one grouped product by default."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.analysis.analyse import dissect
from tests.helpers.grow_everywhere import reasons
from tests.helpers.judging import assert_same_function

transformers = pytest.importorskip("transformers")

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


def build(name: str) -> nn.Module:
    options, _ = EXPERTS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
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


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
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
