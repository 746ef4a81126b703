"""Families of models of timm and Transformers: members are what their libraries would build."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import outgrow
from tests.helpers.nested_sizes import grown_apart, logits
from tests.helpers.random_weights import randomise_parameters


def gpt2() -> tuple[Any, Any, list[Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 12}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    text = {"input_ids": torch.randint(0, 11, (2, 6)), "use_cache": False}
    return model, text, [outgrow.Widen(kind="mlp", by=4), outgrow.Deepen("transformer.h.1")]


def llama() -> tuple[Any, Any, list[Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"input_ids": torch.randint(0, 11, (2, 6)), "use_cache": False}
    return (
        LlamaForCausalLM(LlamaConfig(**sizes)),
        text,
        [outgrow.Widen(kind="mlp", factor=1.5), outgrow.Widen(kind="mlp", by=6)],
    )


def resnet() -> tuple[Any, Any, list[Any]]:
    from timm.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, channels=(4, 4, 6, 6))
    return model, torch.randn(3, 3, 32, 32), [outgrow.Widen("layer4.*", factor=4 / 3), outgrow.Widen("*", by=2)]


@pytest.mark.parametrize("build", [gpt2, pytest.param(llama, marks=pytest.mark.exhaustive), resnet])
def test_a_family_of_a_library_model(build: Any) -> None:
    torch.manual_seed(0)
    model, x, sizes = build()
    randomise_parameters(model.double())
    given = x.double() if isinstance(x, Tensor) else x
    apart = grown_apart(model.eval(), given, sizes)
    family = outgrow.Family(model, given, *sizes)
    for number, (member, alone) in enumerate(zip(family, apart, strict=True)):
        expected, extract = logits(alone, given), family.extract(number)
        torch.testing.assert_close(logits(member, given), expected)
        assert type(extract) is type(alone)
        if hasattr(model, "config"):
            assert extract.config.to_dict() == alone.config.to_dict() == member.config.to_dict()
            rebuilt = type(alone)(extract.config).double().eval()
            rebuilt.load_state_dict(extract.state_dict())
            torch.testing.assert_close(logits(rebuilt, given), expected)
            made = [one.generate(x["input_ids"], max_new_tokens=3, do_sample=False) for one in (member, alone)]
            assert torch.equal(*made)
    assert len({sum(tensor.numel() for tensor in member.parameters()) for member in family}) == len(family)
