"""Small random models of Hugging Face's Transformers, grown whole: logits, cached generation, ties, and what is refused.

Their RMS norms compute in float32 whatever the model's type, so that these models are judged in float32, by how far logits move
when every weight moves to a neighbouring float.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import distance, jiggled, shake

transformers = pytest.importorskip("transformers")

VOCABULARY, MULTIPLE, ULPS, LIMIT = 50, 10.0, 64.0, 1e-4
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = {**SMALL, **TOKENS, "num_key_value_heads": 2, "max_position_embeddings": 64}
BOUNDARY = (
    "output of the model",
    "another direction",
    "looked up",
    "set by the model's input",
    "a fixed table",
    "nothing with",
)
ROTARY = "frequencies of a position encoding"
STATISTICS = "takes its statistics over the units"


@dataclass(frozen=True)
class Case:
    """A model by the names of its classes. `grows`: sizes of volumes afterwards; `refused`: a word of the reason for each."""

    kind: str
    config: str
    options: Mapping[str, Any]
    grows: Mapping[str, int]
    refused: Mapping[str, str]
    dtype: torch.dtype = torch.float32
    generates: bool = True

    def build(self, attention: str) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = attention
        return shake(getattr(transformers, self.kind)(config).to(self.dtype)).eval()

    def example(self, batch: int, length: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        if self.kind.startswith("ViT"):
            return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator, dtype=self.dtype)}
        ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.kind.startswith("T5"):
            inputs["decoder_input_ids"] = ids.flip(1)[:, 1:]
        return inputs

    def __str__(self) -> str:
        return self.config.removesuffix("Config").lower()


CASES = [
    Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        {"model.embed_tokens": 24, "model.layers.0.self_attn.q_proj": 6, "model.layers.1.mlp.gate_proj": 36},
        {"model.rotary_emb": ROTARY},
    ),
    Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**TOKENS, "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"transformer.wte": 24, "transformer.h.0.attn.c_attn": 6, "transformer.h.1.mlp.c_fc": 96},
        {},
        torch.float64,
    ),
    Case(
        "BertForMaskedLM",
        "BertConfig",
        {**SMALL, "max_position_embeddings": 64},
        {"bert.encoder.layer.0.attention.self.query": 6, "bert.encoder.layer.1.intermediate.dense": 36},
        {"bert.embeddings.word_embeddings": STATISTICS},  # the stream comes out of a norm
        torch.float64,
        generates=False,
    ),
    Case(
        "MistralForCausalLM",
        "MistralConfig",
        {**GROUPED, "sliding_window": 8},
        {"model.embed_tokens": 24, "model.layers.0.self_attn.q_proj": 6, "model.layers.1.mlp.gate_proj": 36},
        {"model.rotary_emb": ROTARY},
    ),
    Case(
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
        {"model.embed_tokens": 24, "model.layers.0.self_attn.q_proj": 6, "model.layers.1.mlp.gate_proj": 36},
        {"model.rotary_emb": ROTARY},
    ),
    Case(
        "OPTForCausalLM",
        "OPTConfig",
        {**SMALL, **TOKENS, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64},
        {"model.decoder.embed_tokens": 24, "model.decoder.layers.0.self_attn.q_proj": 6, "model.decoder.layers.1.fc1": 36},
        {},
        torch.float64,
    ),
    Case(
        "ViTForImageClassification",
        "ViTConfig",
        {**SMALL, "image_size": 16, "patch_size": 4, "num_labels": 5},
        {"vit.embeddings.patch_embeddings.projection": 24, "vit.layers.0.attention.q_proj": 6, "vit.layers.1.mlp.fc1": 36},
        {},
        torch.float64,
        generates=False,
    ),
    Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {**TOKENS, "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 0},
        {"encoder.block.0.layer.0.SelfAttention.q": 6, "decoder.block.1.layer.2.DenseReluDense.wi": 36},
        # The encoder's last state is one of the outputs, and with it the stream; by sdpa, heads of cross-attention are too.
        {f"decoder.block.{n}.layer.1.EncDecAttention.q#2": "summed over it" for n in range(2)}
        | {f"decoder.block.{n}.layer.1.EncDecAttention.v#2": "does not follow its size" for n in range(2)},
    ),
]


@torch.no_grad()
def logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**inputs).logits


def generated(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[list[int]]:
    ids = inputs["input_ids"]
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options).tolist()


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Names that share one tensor."""
    names: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_transformer_grows_whole(case: Case, attention: str) -> None:
    model = case.build(attention)
    old, keys, tied = copy.deepcopy(model), list(model.state_dict()), ties(model)
    growth = outgrow.widen(model, case.example(2, 6, seed=1), "*", factor=1.5)

    sizes = {change.volume: change.new for change in growth.plan.changes}
    assert {name: sizes.get(name) for name in case.grows} == case.grows
    for skip in growth.skipped:
        assert any(word in skip.reason for word in (*BOUNDARY, case.refused.get(skip.volume, BOUNDARY[0]))), str(skip)
    assert list(model.state_dict()) == keys
    assert ties(model) == tied

    for batch, length in ((3, 9), (1, 4)):
        fresh = case.example(batch, length, seed=batch + 1)
        want = logits(old, fresh)
        moved = max(distance(want, logits(jiggled(old, seed), fresh)) for seed in range(3))
        allowed = min(max(MULTIPLE * moved, ULPS * torch.finfo(case.dtype).eps), LIMIT)
        assert distance(want, logits(model, fresh)) <= allowed
    if case.generates:
        assert generated(model, fresh) == generated(old, fresh)


def test_a_double_model_that_computes_in_float32_on_its_way_is_judged_by_that() -> None:
    llama = CASES[0]
    model = llama.build("sdpa").double()
    growth = outgrow.widen(model, llama.example(2, 6, seed=1), "*", factor=1.5)
    assert 1e-12 < growth.max_error < growth.tolerance < 1e-4


@pytest.mark.parametrize(("index", "volume"), [(2, "bert.embeddings.word_embeddings"), (0, "model.rotary_emb")])
def test_what_is_named_and_can_not_grow_is_refused_with_its_reason(index: int, volume: str) -> None:
    case = CASES[index]
    model = case.build("eager")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(outgrow.GrowthError, match=case.refused[volume]):
        outgrow.widen(model, case.example(2, 6, seed=1), volume, factor=1.5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("after", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"])
def test_only_the_first_block_of_t5_has_a_position_bias_of_its_own(after: str) -> None:
    case = next(case for case in CASES if case.kind.startswith("T5"))
    model, example = case.build("eager"), case.example(2, 6, seed=1)
    before = logits(model, example)
    outgrow.deepen(model, example, after)
    again = transformers.T5ForConditionalGeneration(model.config)
    again.load_state_dict(model.state_dict())
    assert distance(before, logits(again.eval(), example)) < 1e-5


def test_both_lists_of_gpt_neo_follow_its_depth() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 32}
    config = transformers.GPTNeoConfig(**sizes, **TOKENS, attention_types=[[["global", "local"], 2]], window_size=4)
    model, ids = shake(transformers.GPTNeoForCausalLM(config)).eval(), torch.randint(2, VOCABULARY, (2, 9))
    before = logits(model, {"input_ids": ids})
    outgrow.deepen(model, {"input_ids": ids}, "transformer.h.1")
    again = transformers.GPTNeoForCausalLM(type(config).from_dict(model.config.to_dict()))
    assert again.config.attention_layers == ["global", "local", "global", "global", "local"]
    again.load_state_dict(model.state_dict())
    assert distance(before, logits(again.eval(), {"input_ids": ids})) < 1e-5
