"""Tiny models of many Transformers families with random weights, and examples for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**TOKENS, **SIZES, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
LAYERS = ("model.layers.0", "model.layers.1")
BERT_LAYERS = "encoder.layer.0"
IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 5}


@dataclass(frozen=True)
class Family:
    """A model by the names of its classes, and what of it to grow."""

    model: str
    config: str
    options: Mapping[str, Any]
    mlp: str = "*.mlp.*"
    width: str = "model.embed_tokens"
    depth: Sequence[str] = LAYERS
    inputs: str = "ids"
    parts: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)  # configurations within the configuration

    def __str__(self) -> str:
        return self.config.removesuffix("Config").lower()

    def build(self) -> nn.Module:
        import transformers

        parts = {name: getattr(transformers, kind)(**options) for name, (kind, options) in self.parts.items()}
        config = getattr(transformers, self.config)(**self.options, **parts)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.model)(config)
        return shaken(model, 0).eval()

    def example(self, seed: int = 1, batch: int = 2, length: int = 12) -> dict[str, Tensor]:
        """A batch; texts are padded on the right."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 48, (batch, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        text = {"input_ids": ids, "attention_mask": mask}
        pixels = {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
        if self.inputs == "image":
            return pixels
        if self.inputs == "both":
            return {**text, **pixels}
        if self.inputs == "image in text":
            ids[:, 2:6] = 49
            return {**text, **pixels}
        if self.inputs == "two texts":
            return {**text, "decoder_input_ids": ids.flip(0)[:, :-2]}
        if self.inputs == "sound":
            return {"input_features": torch.randn(batch, 8, 20, generator=generator), "decoder_input_ids": ids[:, :5]}
        return text


@torch.no_grad()
def shaken(model: nn.Module, seed: int) -> nn.Module:
    """Move every parameter by noise that depends on its name and shape, so that two models of one kind stay alike."""
    for name, parameter in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + len(name) * 1009 + sum(map(ord, name)))
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def _moe(**more: Any) -> dict[str, Any]:
    return {**GROUPED, "num_hidden_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8, **more}


GPT2 = {**TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
BART = {**TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64}
T5 = {**TOKENS, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20, "decoder_start_token_id": 1}
JAMBA = {**GROUPED, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
JAMBA |= {"mamba_d_state": 4, "mamba_dt_rank": 4, "num_experts_per_tok": 1}
DEEPSEEK = {**TEXT, "num_hidden_layers": 3, "num_key_value_heads": 4, "moe_intermediate_size": 8, "n_routed_experts": 4}
DEEPSEEK |= {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "rope_interleave": True}
DISTIL = {**TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "num_labels": 5,
}
CONVNEXT = {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 8, 16, 16], "depths": [2, 1, 1, 1], "num_labels": 5}
SMOLLM3 = {**GROUPED, "num_hidden_layers": 4, "no_rope_layer_interval": 2}
CLIP_TEXT, CLIP_VISION = {**TEXT}, {**SIZES, "image_size": 16, "patch_size": 8}
OPT = {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}
MAMBA = {**TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4, "intermediate_size": 32}
LLAVA_PARTS = {"text_config": ("LlamaConfig", GROUPED), "vision_config": ("CLIPVisionConfig", CLIP_VISION)}

FAMILIES = [
    Family("LlamaForCausalLM", "LlamaConfig", GROUPED),
    Family("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    Family(
        "Qwen2ForCausalLM", "Qwen2Config", {**GROUPED, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    Family("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    Family("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 4}),
    Family("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 4, "sliding_window": 4, "num_hidden_layers": 4}),
    Family(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 4, "sliding_window": 4, "sliding_window_pattern": 2}
    ),
    Family("PhiForCausalLM", "PhiConfig", TEXT),
    Family("Phi3ForCausalLM", "Phi3Config", GROUPED),
    Family("CohereForCausalLM", "CohereConfig", GROUPED),
    Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {**GROUPED, "num_hidden_layers": 4, "sliding_window": 4, "sliding_window_pattern": 2},
    ),
    Family("OlmoForCausalLM", "OlmoConfig", GROUPED),
    Family("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    Family("GraniteForCausalLM", "GraniteConfig", {**GROUPED, "attention_multiplier": 0.5, "residual_multiplier": 0.7}),
    Family("StableLmForCausalLM", "StableLmConfig", GROUPED),
    Family("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    Family("NemotronForCausalLM", "NemotronConfig", GROUPED),
    Family("SmolLM3ForCausalLM", "SmolLM3Config", SMOLLM3),
    Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_moe(), "head_dim": 4, "num_local_experts": 2, "num_hidden_layers": 4}
        | {
            "intermediate_size_mlp": 24,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
        },
    ),
    Family("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 3}),
    Family(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _moe(num_experts=3, shared_expert_intermediate_size=8, mlp_only_layers=[0])
    ),
    Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", _moe(num_experts=3, head_dim=4, num_hidden_layers=4, decoder_sparse_step=2)
    ),
    Family("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, depth=("model.layers.0", "model.layers.2")),
    Family("JambaForCausalLM", "JambaConfig", JAMBA, mlp="*.feed_forward.*"),
    Family("MambaForCausalLM", "MambaConfig", MAMBA, "*.mixer.*", "backbone.embeddings", ("backbone.layers.0",)),
    Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**TOKENS, **SIZES},
        width="transformer.word_embeddings",
        depth=("transformer.h.0",),
    ),
    Family(
        "BloomForCausalLM",
        "BloomConfig",
        {**TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        width="transformer.word_embeddings",
        depth=("transformer.h.0",),
    ),
    Family("GPT2LMHeadModel", "GPT2Config", GPT2, width="transformer.wte", depth=("transformer.h.0", "transformer.h.1")),
    Family("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, width="gpt_neox.embed_in", depth=("gpt_neox.layers.0",)),
    Family("GPTJForCausalLM", "GPTJConfig", {**GPT2, "rotary_dim": 4}, width="transformer.wte", depth=("transformer.h.0",)),
    Family("OPTForCausalLM", "OPTConfig", OPT, "*.fc1", "model.decoder.embed_tokens", ("model.decoder.layers.0",)),
    Family(
        "BertForMaskedLM",
        "BertConfig",
        TEXT,
        "*.intermediate.dense",
        "bert.embeddings.word_embeddings",
        ("bert.encoder.layer.0",),
    ),
    Family(
        "RobertaForMaskedLM",
        "RobertaConfig",
        TEXT,
        "*.intermediate.dense",
        "roberta.embeddings.word_embeddings",
        ("roberta.encoder.layer.0",),
    ),
    Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        DISTIL,
        "*.ffn.lin1",
        "distilbert.embeddings.word_embeddings",
        ("distilbert.transformer.layer.0",),
    ),
    Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "num_hidden_layers": 4, "local_attention": 4, "cls_token_id": 1}
        | {"sep_token_id": 2, "global_attn_every_n_layers": 2},
        width="model.embeddings.tok_embeddings",
    ),
    Family(
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        "*.DenseReluDense.*",
        "shared",
        ("encoder.block.0", "decoder.block.1"),
        "two texts",
    ),
    Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {**BART, "decoder_start_token_id": 1},
        "*.fc1",
        "model.shared",
        ("model.encoder.layers.0", "model.decoder.layers.1"),
        "two texts",
    ),
    Family(
        "PegasusForConditionalGeneration",
        "PegasusConfig",
        {**BART, "decoder_start_token_id": 1},
        "*.fc1",
        "model.shared",
        ("model.encoder.layers.0", "model.decoder.layers.1"),
        "two texts",
    ),
    Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        "*.fc1",
        "model.decoder.embed_tokens",
        ("model.encoder.layers.0", "model.decoder.layers.1"),
        "sound",
    ),
    Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**SIZES, **IMAGE},
        width="vit.embeddings.patch_embeddings.projection",
        depth=("vit.layers.0",),
        inputs="image",
    ),
    Family(
        "SwinForImageClassification",
        "SwinConfig",
        SWIN,
        "*.intermediate.dense",
        "swin.embeddings.patch_embeddings.projection",
        ("swin.encoder.layers.0.blocks.1", "swin.encoder.layers.1.blocks.1"),
        "image",
    ),
    Family(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        CONVNEXT,
        "*.pwconv1",
        "convnext.embeddings.patch_embeddings",
        ("convnext.encoder.stages.0.layers.1", "convnext.encoder.stages.2.layers.0"),
        "image",
    ),
    Family(
        "CLIPModel",
        "CLIPConfig",
        {"projection_dim": 8},
        "text_model.*mlp*",
        "text_model.embeddings.token_embedding",
        ("text_model.encoder.layers.0", "vision_model.encoder.layers.1"),
        "both",
        {"text_config": ("CLIPTextConfig", CLIP_TEXT), "vision_config": ("CLIPVisionConfig", CLIP_VISION)},
    ),
    Family(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"image_token_id": 49, "vision_feature_layer": -1},
        "model.language_model.*mlp*",
        "model.language_model.embed_tokens",
        ("model.language_model.layers.0", "model.vision_tower.encoder.layers.1"),
        "image in text",
        LLAVA_PARTS,
    ),
]
