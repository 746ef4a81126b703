"""Lists with one item per layer follow a deepening, or the deepening is refused; a failure leaves configurations unchanged.

The judge is the library: a model that it loads from what was saved computes what the grown one does, with other weights too
(new blocks are the identity at first, which would hide that one is of another kind).
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.configuration.explain_differences import NOT_UPDATED
from outgrow.modules.gates import without_gates
from tests.helpers.library_models import FAMILIES, Family, shaken

transformers = pytest.importorskip("transformers")


def family(name: str) -> Family:
    return next(family for family in FAMILIES if str(family) == name)


@torch.no_grad()
def logits(model: nn.Module, example: dict[str, Tensor]) -> Tensor:
    return model(**example).logits


def reloads(model: nn.Module, kind: Family, folder: Path) -> bool:
    """Whether the library saves and loads a model with the same outputs, with its own weights and with others."""
    model = copy.deepcopy(model)
    without_gates(model)
    model.save_pretrained(folder)
    again, problems = type(model).from_pretrained(folder, output_loading_info=True)
    if any(problems.values()):
        return False
    example = kind.example(seed=5, batch=3)
    pairs = [(logits(one.eval(), example), logits(shaken(one, 7), example)) for one in (model, again)]
    return all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*pairs, strict=True))


def said(model: nn.Module, names: Any) -> dict[str, Any]:
    return {name: getattr(model.config, name) for name in names}


@pytest.mark.parametrize("fade", [None, 3])
@pytest.mark.parametrize(
    ("name", "after", "says"),
    [
        ("smollm3", "model.layers.0", {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 0, 1, 0]}),
        ("smollm3", "model.layers.1", {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0]}),
        ("whisper", "model.encoder.layers.0", {"encoder_layers": 3, "decoder_layers": 2, "num_hidden_layers": 3}),
        ("whisper", "model.decoder.layers.1", {"encoder_layers": 2, "decoder_layers": 3, "num_hidden_layers": 2}),
        ("swin", "swin.encoder.layers.1.blocks.1", {"depths": [2, 3], "num_layers": 2}),
        ("convnext", "convnext.encoder.stages.0.layers.1", {"depths": [3, 1, 1, 1]}),
        ("deepseekv3", "model.layers.0", {"num_hidden_layers": 4}),  # dense or, with a fade, sparse
        ("qwen2moe", "model.layers.0", {"num_hidden_layers": 3}),
    ],
)
def test_the_configuration_says_of_each_layer_what_it_is(
    name: str, after: str, says: dict[str, Any], fade: int | None, tmp_path: Path
) -> None:
    kind = family(name)
    model, example = kind.build(), kind.example()
    before = logits(model, example)
    growth = outgrow.deepen(model, example, after, fade=fade)
    assert NOT_UPDATED not in str(growth)
    assert said(model, says) == says
    if name == "smollm3":
        assert [layer.self_attn.use_rope for layer in model.model.layers] == model.config.no_rope_layers
    assert torch.allclose(logits(model, example), before, atol=1e-5)
    assert reloads(model, kind, tmp_path)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 3}
MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 4, "n_groups": 2, "chunk_size": 8, "hidden_size": 16}
TEXT = {"vocab_size": 50, "pad_token_id": 0, "num_hidden_layers": 2}
HYV4 = {**TEXT, **SMALL, "vocab_size": 50, "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2}
HYV4 |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "head_dim": 4}
HYV4 |= {"mlp_layer_types": ["dense", "sparse"], "layer_types": ["indexed_attention"] * 2, "indexer_types": ["full"] * 2}
HYV4 |= {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "n_group": 2, "topk_group": 1}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 3}


def small(name: str, config: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shaken(getattr(transformers, name)(getattr(transformers, config)(**options)).eval(), 1)


@pytest.mark.parametrize(
    ("name", "config", "options", "after", "says"),
    [
        ("Mamba2ForCausalLM", "Mamba2Config", {**TEXT, **MAMBA2}, "backbone.layers.0", "num_hidden_layers 2 → 3"),  # an ∞ in it
        ("BeitForImageClassification", "BeitConfig", {**SMALL, **IMAGE}, "beit.layers.1", "num_hidden_layers 2 → 3"),
        (
            "Dinov2ForImageClassification",
            "Dinov2Config",
            {**SMALL, **IMAGE},
            "dinov2.encoder.layer.0",
            "num_hidden_layers 2 → 3",
        ),
        (
            "ConvNextForImageClassification",
            "ConvNextConfig",
            CONVNEXT,
            "convnext.encoder.stages.1.layers.0",
            "depths [1, 1] → [1, 2]",
        ),
    ],
)
def test_every_changed_field_is_reported_and_the_library_reloads_the_model(
    name: str, config: str, options: dict[str, Any], after: str, says: str, tmp_path: Path
) -> None:
    model = small(name, config, **options)
    ids = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(1))
    example = {"pixel_values": torch.randn(2, 3, 16, 16)} if "num_labels" in options else {"input_ids": ids}
    if "Beit" in name and after.rpartition(".")[0] not in dict(model.named_modules()):
        after = "beit.encoder.layer.1"  # its path in earlier versions of the library
    before = model.config.to_dict()
    growth = outgrow.deepen(model, example, after)
    assert [note for note in growth.notes if note.startswith("config")] == [f"config: {says}"]
    changed = {key for key, value in model.config.to_dict().items() if before.get(key) != value}
    assert changed == {says.split()[0]}
    model.save_pretrained(tmp_path)
    again, problems = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    pairs = [(logits(one.eval(), example), logits(shaken(one, 7), example)) for one in (model, again)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*pairs, strict=True))


def test_kinds_of_indexers_follow_the_layers(tmp_path: Path) -> None:
    model, ids = small("HYV4ForCausalLM", "HYV4Config", **HYV4), {"input_ids": torch.arange(3, 15).view(2, 6)}
    growth = outgrow.deepen(model, ids, "model.layers.1")
    assert NOT_UPDATED not in str(growth)
    assert model.config.indexer_types == ["full", "full", "full"]
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), ids), logits(model, ids))


@pytest.mark.parametrize(
    ("stack", "counts", "order"), [("encoder.block", (4, 2), "interleave"), ("decoder.block", (2, 4), "stack")]
)
def test_only_the_first_block_of_each_stack_of_t5_has_positions(
    stack: str, counts: tuple[int, int], order: str, tmp_path: Path
) -> None:
    kind = family("t5")
    model, example = kind.build(), kind.example()
    growth = outgrow.grow(model, example, outgrow.Deepen(layers=4, stack=stack, order=order))
    assert NOT_UPDATED not in str(growth)
    assert (model.config.num_layers, model.config.num_decoder_layers) == counts
    assert model.encoder.config.num_layers == counts[0]
    assert model.decoder.config.num_layers == counts[1]
    assert reloads(model, kind, tmp_path)


def test_copies_of_a_first_block_without_a_norm_are_those_of_another_block(tmp_path: Path) -> None:
    kind = family("modernbert")
    model, example = kind.build(), kind.example()
    growth = outgrow.grow(model, example, outgrow.Deepen(layers=8))
    assert NOT_UPDATED not in str(growth)
    assert model.config.layer_types == ["full_attention", "sliding_attention"] * 4
    assert reloads(model, kind, tmp_path)


def test_a_configuration_that_can_not_describe_the_model_is_as_before(path: Path) -> None:
    """Swin shifts the windows of every other block, so that one stage of one block can't have a second one like it."""
    options = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
    model = small("SwinForImageClassification", "SwinConfig", **options, num_labels=3)
    fresh, average = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    before, example = copy.deepcopy(vars(model.config)), {"pixel_values": torch.randn(2, 3, 16, 16)}
    growth = outgrow.deepen(model, example, "swin.encoder.layers.1.blocks.0", average=average)
    assert NOT_UPDATED in str(growth)
    assert "even after depths [1, 1] → [1, 2]" in str(growth)
    assert not any(note.startswith("config: depths") for note in growth.notes)
    assert vars(model.config) == vars(average.module.config) == before
    outgrow.save(model, path)
    assert torch.equal(logits(outgrow.load(fresh, path), example), logits(model, example))
    assert vars(fresh.config) == before


def test_fields_that_the_forward_pass_reads_stay_changed_and_the_report_says_why() -> None:
    """DiffLlama's layers depend on their numbers; it runs as many as its configuration says."""
    options = {**TEXT, **SMALL, "num_key_value_heads": 2}
    model = small("DiffLlamaForCausalLM", "DiffLlamaConfig", **options)
    example = {"input_ids": torch.randint(3, 50, (2, 6))}
    getter = type(model.config).__getattribute__
    growth = outgrow.deepen(model, example, "model.layers.1")
    assert growth.notes[0] == "config: num_hidden_layers 2 → 3 (the model's code reads it in its forward pass)"
    assert NOT_UPDATED in growth.notes[1]
    assert type(model.config).__getattribute__ is getter
    after = logits(model, example)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.normal_()
    assert not torch.allclose(logits(model, example), after)  # the new layer runs


@pytest.fixture
def another_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """ε follows the width, also where the writers of a stream could pay."""
    monkeypatch.setattr("outgrow.transforms.widen.settle_sizes.payments", lambda *args, **options: {})


@pytest.mark.usefixtures("another_epsilon")
def test_the_reason_is_the_field_that_would_need_two_values() -> None:
    """Qwen3 has one ε for norms over the stream, which grew, and over the heads' features, which did not."""
    options = {**TEXT, **SMALL, "num_key_value_heads": 2, "head_dim": 8}
    model = small("Qwen3ForCausalLM", "Qwen3Config", **options)
    ids = torch.randint(3, 50, (2, 6))
    growth = outgrow.widen(model, {"input_ids": ids}, "*", factor=2)
    named = re.search(r"\(rms_norm_eps would have to be (\S+) for (\S+) and (\S+) for (\S+)\)", str(growth))
    assert named is not None
    for value, place in (named.group(1, 2), named.group(3, 4)):
        module, _, name = place.rpartition(".")
        assert getattr(model.get_submodule(module), name) == float(value)


def test_what_a_configuration_can_not_say_is_reported_with_the_place(tmp_path: Path) -> None:
    """Every other layer is sparse by a number in the configuration, so that one more moves all behind it."""
    kind = family("qwen3moe")
    model = kind.build()
    growth = outgrow.deepen(model, kind.example(), "model.layers.1", fade=3)
    assert NOT_UPDATED in str(growth)
    assert "(built from it, model.layers.3.mlp." in str(growth)
    assert not reloads(model, kind, tmp_path)


@pytest.mark.parametrize("fade", [None, 3])
def test_layers_in_a_pattern_are_added_in_whole_periods(fade: int | None, tmp_path: Path) -> None:
    kind = family("jamba")
    model, example = kind.build(), kind.example()  # padded: its code prepares a mask for each kind of layer
    config, names = copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    with pytest.raises(outgrow.GrowthError, match=r"would describe block 2 as 'linear_attention', but .* \(count=2\)"):
        outgrow.deepen(model, example, "model.layers.0", fade=fade)
    assert model.config.to_dict() == config
    assert list(model.state_dict()) == names
    before = logits(model, example)
    growth = outgrow.deepen(model, example, "model.layers.1", count=2, fade=fade)
    assert NOT_UPDATED not in str(growth)
    assert model.config.layers_block_type == ["mamba", "attention"] * 3
    assert torch.allclose(logits(model, example), before, atol=1e-5)
    assert reloads(model, kind, tmp_path)


def test_a_stack_of_less_than_one_period_is_refused_without_advice_on_a_count() -> None:
    """The pattern is recurrent, recurrent, attention; two blocks look like a pattern of one."""
    options = {**TEXT, **SMALL, "lru_width": 16, "attention_window_size": 4, "head_dim": 8, "num_key_value_heads": 1}
    model, ids = small("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **options), torch.arange(3, 15).view(2, 6)
    with pytest.raises(outgrow.GrowthError, match="would describe block 2 as") as refusal:
        outgrow.deepen(model, {"input_ids": ids, "use_cache": False}, "model.layers.0")
    assert "count=" not in str(refusal.value)


def test_modules_that_a_forward_pass_exchanges_do_not_keep_the_configuration_from_following(tmp_path: Path) -> None:
    sides = ("layers", "attention_heads", "ffn_dim")
    options = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in zip(sides, (2, 4, 24), strict=True)}
    options |= {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 64, "pad_token_id": 0, "decoder_start_token_id": 0}
    model = small("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", **options)
    ids = torch.arange(3, 15).view(2, 6)
    example = {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
    logits(model, example)  # it exchanges its attentions here
    growth = outgrow.deepen(model, example, "model.encoder.layers.0")
    assert growth.notes[-1] == "config: encoder_layers 2 → 3"
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.allclose(logits(again, example), logits(model, example), atol=1e-6)


BIG_BIRD: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
BIG_BIRD |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "vocab_size": 50, "block_size": 4}
BIG_BIRD |= {"num_random_blocks": 1, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def big_bird() -> tuple[nn.Module, dict[str, Tensor], dict[str, Tensor]]:
    """A model with sparse attention, an input that is too short for it, and a long one."""
    model = small("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", **BIG_BIRD)
    ids = torch.arange(3, 35).repeat(2).view(2, 32)
    return (
        model,
        {"input_ids": ids[:, :6], "decoder_input_ids": ids[:, :5]},
        {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
    )


def test_modules_that_a_pass_exchanges_are_put_back_and_the_model_runs_on_all_inputs() -> None:
    model, short, long = big_bird()
    before = {path: type(module) for path, module in model.named_modules()}
    wanted = [logits(copy.deepcopy(model), example) for example in (short, long)]
    outgrow.volumes(model, short)
    assert {path: type(module) for path, module in model.named_modules()} == before
    growth = outgrow.widen(model, short, ["model.encoder.layers.0.fc1", "model.encoder.layers.1.fc1"], by=4)
    assert growth.notes[-1] == "config: encoder_ffn_dim 24 → 28"
    assert {path: type(module) for path, module in model.named_modules()} == before
    for example, want in zip((short, long), wanted, strict=True):
        assert torch.allclose(logits(copy.deepcopy(model), example), want, atol=1e-5)
    with pytest.raises(outgrow.GrowthError, match=r"self_attn does not follow its size"):
        outgrow.widen(model, short, "model.encoder.layers.0.self_attn.self.query", by=2)
    assert torch.allclose(logits(model, long), wanted[1], atol=1e-5)


def test_more_heads_of_exchanged_modules_are_loaded_into_a_model_that_has_exchanged_them(tmp_path: Path) -> None:
    model, short, long = big_bird()
    logits(model, short)  # from here on, it has full attention
    wanted = [logits(model, example) for example in (short, long)]
    growth = outgrow.widen(model, short, kind="heads", by=2)
    assert "model.encoder.layers.0.self_attn.self is a BigBirdPegasusSelfAttention here, and a BigBirdPegasusBlock" in str(
        growth
    )
    assert "run the new model on one before outgrow.load" in str(growth)
    outgrow.save(model, tmp_path / "grown.safetensors")
    again, _, _ = big_bird()
    logits(again, short)
    outgrow.load(again, tmp_path / "grown.safetensors")
    for one in (model, again):
        for example, want in zip((short, long), wanted, strict=True):
            assert torch.allclose(logits(one, example), want, atol=1e-5)


def test_a_value_that_follows_from_others_is_left_to_follow() -> None:
    """Falcon's head size is a property without a setter: the width over the heads."""
    kind = family("falcon")
    model, example = kind.build(), kind.example()
    config, attributes = copy.deepcopy(model.config.to_dict()), copy.deepcopy(vars(model.config))
    before = logits(model, example)
    growth = outgrow.widen(model, example, "transformer.word_embeddings", factor=2)
    assert torch.allclose(logits(model, example), before, atol=1e-5)
    assert NOT_UPDATED in str(growth)
    assert model.config.to_dict() == config
    assert vars(model.config) == attributes


@pytest.mark.usefixtures("another_epsilon")
def test_a_configuration_that_refuses_a_value_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure at the second field that is set, with an error of another library."""
    kind = family("llama")
    model, example = kind.build(), kind.example()
    config, attributes = copy.deepcopy(model.config.to_dict()), copy.deepcopy(vars(model.config))
    plain = type(model.config).__setattr__

    def strict(self: Any, name: str, value: Any) -> None:
        if name == "rms_norm_eps" and value != 1e-6:
            raise RuntimeError("no such value")
        plain(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(type(model.config), "__setattr__", strict)
        growth = outgrow.widen(model, example, "model.embed_tokens", factor=2)
    reason = (
        "built from it with hidden_size 32, model.layers.0.input_layernorm.variance_epsilon would be 1e-06 instead of 5e-07"
    )
    assert f"{NOT_UPDATED} ({reason})" in str(growth)
    assert model.config.to_dict() == config
    assert vars(model.config) == attributes


def test_an_interrupt_while_a_configuration_is_set_leaves_it_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = family("llama")
    model, example = kind.build(), kind.example()
    attributes, weights = copy.deepcopy(vars(model.config)), copy.deepcopy(model.state_dict())

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outgrow.configuration.follow_sizes.rebuilt", interrupted)
    with pytest.raises(KeyboardInterrupt):
        outgrow.grow(model, example, outgrow.Widen("*", factor=2), outgrow.Deepen(after="model.layers.0"))
    assert vars(model.config) == attributes
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
