"""A Transformers model's configuration follows a growth, or the report says that it does not.

The judge is the library itself: what it builds from the configuration loads the grown weights and computes the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.configuration.explain_differences import NOT_UPDATED

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"vocab_size": 50, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
VIT = {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5}
KINDS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", {"vocab_size": 50, **SIZES}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def build(kind: str) -> nn.Module:
    """A model with weights of no special kind; tables that are not saved are as the library makes them."""
    name, config, options = KINDS[kind]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def example(kind: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    ids = torch.randint(3, 50, (2, 6), generator=generator)
    return {"input_ids": ids, "decoder_input_ids": ids.flip(0)} if kind == "t5" else {"input_ids": ids}


@torch.no_grad()
def logits(model: nn.Module, kind: str) -> Tensor:
    return model(**example(kind, seed=5)).logits


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "where", "how", "says"),
    [
        ("llama", "*.mlp.*", {"factor": 1.5}, {"intermediate_size": 36, "hidden_size": 16}),
        ("llama", "*.self_attn.*", {"by": 4}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
        ("llama", "*", {"factor": 1.5}, {"hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 6, "head_dim": 4}),
        ("gemma", "model.embed_tokens", {"by": 8}, {"hidden_size": 24, "rms_norm_eps": 1e-6}),  # embeddings times √width
        ("qwen2", "*.self_attn.*", {"by": 4}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
        ("gemma", "*.self_attn.*", {"by": 4}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}),
        ("bert", "*.intermediate.*", {"factor": 1.5}, {"intermediate_size": 36}),
        ("gpt2", "*.mlp.*", {"factor": 1.5}, {"n_inner": 96}),
        ("gpt2", "*", {"factor": 1.5}, {"n_embd": 24, "n_head": 6, "n_inner": None}),
        ("vit", "*.mlp.*", {"factor": 1.5}, {"intermediate_size": 36}),
        ("vit", "*", {"factor": 1.5}, {"hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 6}),
        ("t5", "*.Dense*.*", {"factor": 1.5}, {"d_ff": 36}),
    ],
)
def test_a_uniform_widening_is_in_the_configuration(
    kind: str, where: str, how: dict[str, float], says: dict[str, Any], tmp_path: Path
) -> None:
    model = build(kind)
    before = logits(model, kind)
    random = torch.get_rng_state()
    growth = outgrow.widen(model, example(kind), where, **how)
    assert torch.equal(torch.get_rng_state(), random)
    assert NOT_UPDATED not in str(growth)
    assert {name: getattr(model.config, name) for name in says} == says
    assert shapes(type(model)(model.config)) == shapes(model)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for name, value in says.items():
        assert {getattr(config, name) for config in configs.values()} == {value}  # T5's two stacks have their own

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, kind), logits(model, kind))
    assert torch.allclose(logits(again, kind), before, atol=1e-4)


def test_the_report_shows_the_new_configuration() -> None:
    growth = outgrow.widen(build("gpt2"), example("gpt2"), "*.mlp.*", factor=1.5)
    assert "config: n_inner None → 96" in str(growth).splitlines()
    growth = outgrow.deepen(build("llama"), example("llama"), "model.layers.0", count=2)
    assert "config: num_hidden_layers 2 → 4" in str(growth).splitlines()


@pytest.mark.parametrize(
    ("kind", "where", "by"),
    [
        ("llama", "model.layers.1.mlp.gate_proj", 12),  # one layer of two
        ("llama", "*.self_attn.*", 2),  # six heads: Llama's own configuration does not allow them beside sixteen features
        ("gpt2", "*.attn.*", 2),  # GPT-2's heads have the stream's size between them
    ],
)
def test_what_no_configuration_describes_leaves_it_alone_and_says_so(kind: str, where: str, by: int) -> None:
    model = build(kind)
    before = copy.deepcopy(model.config.to_dict())
    growth = outgrow.widen(model, example(kind), where, by=by, method="netmorph")
    assert model.config.to_dict() == before
    assert NOT_UPDATED in str(growth)


def test_heads_without_the_width_are_reported_with_the_way_out() -> None:
    growth = outgrow.widen(build("gpt2"), example("gpt2"), kind="heads", factor=2)
    assert "let both grow in one call: outgrow.Widen(kind='heads', factor=2), outgrow.Widen(kind='width', factor=2)" in str(
        growth
    )


def test_a_size_that_the_library_refuses_is_reported_in_its_words() -> None:
    growth = outgrow.widen(build("llama"), example("llama"), kind="heads", by=2)
    assert "with num_attention_heads 6, num_key_value_heads 3, LlamaForCausalLM can't be built from it" in str(growth)
    assert "The hidden size (16) is not a multiple of the number of attention heads (6)" in str(growth)


def test_the_last_of_several_growths_completes_what_the_configuration_can_say() -> None:
    model, given = build("llama"), example("llama")
    for layer, to in ((0, 36), (1, 30), (1, 36)):
        growth = outgrow.widen(model, given, f"model.layers.{layer}.mlp.gate_proj", to=to)
        assert (NOT_UPDATED in str(growth)) == ((layer, to) != (1, 36))
    assert model.config.intermediate_size == 36
    assert shapes(type(model)(model.config)) == shapes(model)


def test_a_configuration_inside_another_follows_alone() -> None:
    text = {"vocab_size": 50, **SIZES, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**SIZES, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = transformers.CLIPModel(config).eval()
    given = {"input_ids": torch.randint(3, 50, (2, 6)), "pixel_values": torch.randn(2, 3, 16, 16)}
    growth = outgrow.widen(model, given, "text_model.*mlp*", factor=2)
    assert growth.notes == ("config: intermediate_size 24 → 48",)
    assert (model.config.text_config.intermediate_size, model.config.vision_config.intermediate_size) == (48, 24)
    assert shapes(type(model)(model.config)) == shapes(model)


def test_part_of_a_model_of_ones_own_is_described_by_its_configuration() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = build("gpt2").transformer, nn.Linear(16, 3)
            self.other = build("gpt2").transformer
            self.other.h[0].mlp.act = nn.Tanh()  # its configuration says otherwise, which is none of this growth's business

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(input_ids=ids).last_hidden_state + self.other(input_ids=ids).last_hidden_state)

    model, ids = Tagger(), example("gpt2")["input_ids"]
    growth = outgrow.widen(model, ids, "body.h.*.mlp.c_fc", factor=1.5)
    assert growth.notes == ("config: n_inner None → 96",)
    assert model.body.config.n_inner == 96
    assert shapes(type(model.body)(model.body.config)) == shapes(model.body)


def test_a_refusal_and_a_failing_growth_put_the_configuration_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = build("qwen2"), example("qwen2")
    before, names = copy.deepcopy(model.config.to_dict()), set(vars(model.config))

    def fail(*_: object) -> None:
        assert model.config.head_dim == 4  # it has followed by then
        raise outgrow.GrowthError("no")

    with monkeypatch.context() as patch:
        patch.setattr("outgrow.verify.outputs.check", fail)
        with pytest.raises(outgrow.GrowthError, match="no"):
            outgrow.widen(model, given, "*.self_attn.*", by=4)
    assert model.config.to_dict() == before
    assert set(vars(model.config)) == names


def test_a_copy_that_is_averaged_follows() -> None:
    model = build("llama")
    average = torch.optim.swa_utils.AveragedModel(model)
    outgrow.widen(model, example("llama"), "*.mlp.*", factor=1.5, average=average)
    assert average.module.config is not model.config
    assert average.module.config.intermediate_size == 36


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_checkpoint_carries_the_configuration(kind: str, path: Path) -> None:
    model, fresh = build(kind), build(kind)
    outgrow.widen(model, example(kind), "*", factor=1.5)
    outgrow.save(model, path)
    outgrow.load(fresh, path)
    assert fresh.config.to_dict() == model.config.to_dict()
    assert torch.equal(logits(fresh, kind), logits(model, kind))
    grown = outgrow.load(type(model)(copy.deepcopy(model.config)).eval(), path)  # built at the final size
    assert grown.config.to_dict() == model.config.to_dict()
    assert torch.equal(logits(grown, kind), logits(model, kind))


def test_what_can_not_be_built_from_its_configuration_is_left_alone() -> None:
    class Config:
        def __init__(self) -> None:
            self.hidden_size = 8

        def to_dict(self) -> dict[str, int]:
            return vars(self)

    class Model(nn.Sequential):
        def __init__(self, config: Config, layers: Sequence[nn.Module]) -> None:
            super().__init__(*layers)
            self.config = config

    model = Model(Config(), [nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)])
    growth = outgrow.widen(model, torch.randn(4, 3), "0", to=12)
    assert len(growth.notes) == 1
    assert NOT_UPDATED in growth.notes[0]
    assert model.config.hidden_size == 8


def test_a_block_that_fades_in_is_counted() -> None:
    model = build("llama")
    growth = outgrow.deepen(model, example("llama"), "model.layers.0", fade=10)
    assert growth.notes[0] == "config: num_hidden_layers 2 → 3"
    assert shapes(type(model)(model.config)) == shapes(model)


def test_a_number_of_positions_that_equals_the_width_stays() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        max_position_embeddings=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        vocab_size=20,
    )
    model = transformers.LlamaForCausalLM(config)
    outgrow.widen(model, torch.arange(3, 9)[None], "model.embed_tokens", to=24)
    assert (model.config.hidden_size, model.config.max_position_embeddings) == (24, 16)


def test_a_field_that_the_forward_pass_reads_is_set_once(path: Path) -> None:
    """As in xLSTM: the widening sets the field so that the code runs, and the configuration has followed by that."""

    class Config:
        def __init__(self, num_heads: int = 4) -> None:
            self.num_heads = num_heads

        def to_dict(self) -> dict[str, int]:
            return dict(vars(self))

    class Attention(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.config = config
            self.qkv, self.out = nn.Linear(16, 12 * config.num_heads), nn.Linear(4 * config.num_heads, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.config.num_heads, 4).permute(2, 0, 3, 1, 4)
            return x + self.out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self, config: Config) -> None:
            super().__init__()
            self.config = config
            self.layers = nn.Sequential(Attention(config), Attention(config))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    model, x = Model(Config()), torch.randn(2, 5, 16)
    for by in (2, 4):
        growth = outgrow.widen(model, x, kind="heads", by=by)
        made = [setting for setting in growth.plan.settings if setting.name == "config"]
        assert [(setting.item, setting.new - setting.old) for setting in made] == [("num_heads", by)]
        assert f"config: num_heads {model.config.num_heads - by} → {model.config.num_heads}" in growth.notes
    outgrow.save(model, path)
    again = outgrow.load(Model(Config()), path)
    assert again.config.num_heads == 10
    assert torch.equal(again(x), model(x))
