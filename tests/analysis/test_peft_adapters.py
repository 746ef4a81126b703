"""Growth of a model with PEFT adapters: they follow their layers, ranks grow if a pattern names them, saved files load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

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


TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]


def adapted(adapter: Any = None, more: Any = None) -> Any:
    """A Llama with an adapter (LoRA), and with another one that is not active."""
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model: Any = peft.get_peft_model(base, adapter or lora())
    if more is not None:
        model.add_adapter("more", more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options})


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=EXAMPLE["input_ids"].flip(1)).logits[..., : LLAMA["vocab_size"]]


def ranks(model: nn.Module) -> set[int]:
    return {len(parameter) for name, parameter in model.named_parameters() if "lora_A" in name}


@pytest.mark.parametrize(
    "transform",
    [
        outgrow.Widen("*", factor=2),
        outgrow.Widen(kind="mlp", factor=1.5),
        outgrow.Widen(kind="heads", factor=2),
        outgrow.Widen(kind="width", factor=1.5),
        outgrow.Widen(kind="vocab", by=6),
        outgrow.Deepen(layers=4),
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
        assert torch.allclose(logits(copy.deepcopy(model).merge_and_unload()), before, atol=1e-5)
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


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # of PEFT 0.18, which is not true here
def test_adapters_that_are_not_active_and_trained_copies_grow_along() -> None:
    both = {"modules_to_save": ["lm_head", "embed_tokens"], "layers_to_transform": [0]}
    model = adapted(lora(**both), lora(**both))
    found: dict[str, list[Tensor]] = {}
    requests = outgrow.Widen(kind="mlp", factor=1.5), outgrow.Widen(kind="width", factor=1.5), outgrow.Widen(kind="vocab", by=6)
    for grown in (False, True):
        if grown:
            outgrow.grow(model, EXAMPLE, *requests)
        for name in ("more", "default"):
            model.set_adapter(name)
            found.setdefault(name, []).append(logits(model))
        with model.disable_adapter():
            found.setdefault("none", []).append(logits(model))
    for before, after in found.values():
        assert torch.allclose(before, after, atol=1e-5)
    layer = model.get_submodule(f"{LAYERS}.0.mlp.gate_proj")
    assert (layer.in_features, layer.out_features) == (24, 36)
    model.add_adapter("later", lora())  # made by the sizes of the layers
    model.set_adapter("later")
    assert torch.allclose(logits(model), found["none"][1], atol=1e-5)  # B starts at zero


def test_training_goes_on_with_the_adapters() -> None:
    model = adapted()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01) for one in (model, twin)]

    def step(number: int) -> None:
        one, optimizer = (model, twin)[number], optimizers[number]
        optimizer.zero_grad()
        one(**EXAMPLE).logits.square().mean().backward()
        optimizer.step()

    step(0), step(1)
    growth = outgrow.grow(model, EXAMPLE, outgrow.Widen(kind="mlp", factor=1.5), optimizer=optimizers[0])
    step(0), step(1)
    assert growth.preserving
    for name, value in twin.named_parameters():
        own = model.get_parameter(name)
        assert own.requires_grad == value.requires_grad == ("lora_" in name)
        if value.requires_grad and own.shape == value.shape and "mlp" not in name:
            torch.testing.assert_close(own, value)


@pytest.mark.parametrize(
    ("adapter", "merged", "reason"),
    [
        (lora(use_dora=True), False, r"DoRA: each row of W \+ s·B·A is divided by its norm(.|\n)*merge_and_unload"),
        (lora(), True, r"while they are merged into their layers(.|\n)*unmerge_adapter"),
        (
            peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM"),
            False,
            "adapters: they may be in the way",
        ),
    ],
)
def test_adapters_that_can_not_follow_are_refused_with_the_reason(adapter: Any, merged: bool, reason: str) -> None:
    model = adapted(adapter)
    if merged:
        model.merge_adapter()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match=reason):
        outgrow.grow(model, EXAMPLE, outgrow.Widen(kind="mlp", factor=1.5))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_quantised_base_is_refused_with_the_reason() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = adapted(lora(target_modules=["q_proj"]))
    for layer in model.get_submodule(LAYERS):
        old = layer.mlp.up_proj
        layer.mlp.up_proj = bitsandbytes.nn.Linear8bitLt(old.in_features, old.out_features, bias=False, has_fp16_weights=False)
        values = bitsandbytes.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        layer.mlp.up_proj.weight = values
        layer.mlp.up_proj.to("cpu")
    with pytest.raises(outgrow.GrowthError, match=r"up_proj.weight is quantised(.|\n)*before it is quantised"):
        outgrow.grow(model, EXAMPLE, outgrow.Widen(kind="width", factor=1.5))
