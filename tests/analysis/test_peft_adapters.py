"""Growth of a model with PEFT adapters: they follow their layers, ranks grow if a pattern names them, saved files load."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.analysis.peft_adapters import NOTE, RANK
from outgrow.configuration.explain_differences import NOT_UPDATED

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"vocab_size": 50, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
LAYERS = "base_model.model.model.layers"
EXAMPLE = {"input_ids": torch.arange(3, 15).view(2, 6)}


def adapted() -> nn.Module:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model: nn.Module = peft.get_peft_model(base, lora)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=EXAMPLE["input_ids"].flip(1)).logits


def ranks(model: nn.Module) -> set[int]:
    return {len(parameter) for name, parameter in model.named_parameters() if "lora_A" in name}


@pytest.mark.parametrize(
    "transform",
    [
        outgrow.Widen("*.mlp.*", factor=2),
        outgrow.Widen("*", factor=2),
        outgrow.Deepen(after=f"{LAYERS}.0"),
        outgrow.Deepen(after=f"{LAYERS}.1", method="copy"),
    ],
    ids=str,
)
def test_base_model_and_adapters_load_again(transform: outgrow.Widen | outgrow.Deepen, tmp_path: Path) -> None:
    model = adapted()
    before = logits(model)
    growth = outgrow.grow(model, EXAMPLE, transform)
    assert ranks(model) == {4}
    assert NOTE in growth.notes
    assert NOT_UPDATED not in str(growth)
    if growth.preserving:
        assert torch.allclose(logits(model), before, atol=1e-5)
    model.save_pretrained(tmp_path / "adapters", save_embedding_layers=False)  # "auto" looks for the base model online
    copy.deepcopy(model).unload().save_pretrained(tmp_path / "base")
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    assert torch.equal(logits(again), logits(model))


def test_a_glob_leaves_ranks_alone_and_says_so() -> None:
    growth = outgrow.widen(adapted(), EXAMPLE, "*.mlp.*", factor=2)
    assert {skip.reason for skip in growth.skipped} == {RANK}
    with pytest.raises(outgrow.GrowthError, match="rank of an adapter"):
        outgrow.widen(adapted(), EXAMPLE, "*.down_proj.*", factor=2)


@pytest.mark.parametrize("where", ["*.lora_A.*", f"{LAYERS}.0.mlp.down_proj.lora_A.default"])
def test_ranks_that_are_named_grow_and_the_report_says_that_their_configuration_does_not(where: str) -> None:
    model = adapted()
    before = logits(model)
    growth = outgrow.widen(model, EXAMPLE, where, factor=2)
    assert 8 in ranks(model)
    assert torch.allclose(logits(model), before, atol=1e-5)
    assert NOT_UPDATED in str(growth)
    assert "lora_A.default.weight would have the shape (4, " in str(growth)
