"""Standard examples run every part of a model, and a given example is read from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outgrow
from outgrow import Widen
from outgrow.checkpoints.build_on_meta import build_on_meta
from outgrow.checkpoints.standard_examples import example_for
from outgrow.cli.main import main
from outgrow.errors import CheckpointError
from tests.helpers.checkpoints import family, logits_elsewhere
from tests.helpers.library_models import GROUPED, SIZES, shaken

transformers = pytest.importorskip("transformers")

CONVOLUTIONS = {"conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (3, 2), "num_feat_extract_layers": 2}
WAVE = {**SIZES, **CONVOLUTIONS, "vocab_size": 30, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4}
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
SPEECH = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SPEECH |= {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64, "max_target_positions": 32}
M_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}}
QWEN_VISION = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}


def llava(token: int = 49) -> Any:
    parts = {"text_config": transformers.LlamaConfig(**GROUPED), "vision_config": transformers.CLIPVisionConfig(**VISION)}
    return transformers.LlavaConfig(**parts, image_token_id=token, vision_feature_layer=-1)


def qwen() -> Any:
    tokens = {"image_token_id": 49, "video_token_id": 48, "vision_start_token_id": 47, "vision_end_token_id": 46}
    return transformers.Qwen2VLConfig(text_config={**GROUPED, **M_ROPE}, vision_config=QWEN_VISION, **tokens)


MODELS: dict[str, Any] = {  # class, configuration, inputs
    "wav2vec2": ("Wav2Vec2ForCTC", lambda: transformers.Wav2Vec2Config(**WAVE), {"input_values"}),
    "spectrogram": (
        "ASTForAudioClassification",
        lambda: transformers.ASTConfig(**SIZES, patch_size=4, max_length=16, num_mel_bins=8, frequency_stride=2, time_stride=2),
        {"input_values"},
    ),
    "speech to text": (
        "Speech2TextForConditionalGeneration",
        lambda: transformers.Speech2TextConfig(**SPEECH, vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        {"input_features", "decoder_input_ids"},
    ),
    "images in texts": ("LlavaForConditionalGeneration", llava, {"input_ids", "attention_mask", "pixel_values"}),
    "patches": (
        "Qwen2VLForConditionalGeneration",
        qwen,
        {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"},
    ),
    "video": (
        "VideoMAEForVideoClassification",
        lambda: transformers.VideoMAEConfig(**SIZES, image_size=16, patch_size=4, num_frames=4),
        {"pixel_values"},
    ),
    "legacy constructors": (
        "XLNetLMHeadModel",
        lambda: transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=4, d_inner=24),
        {"input_ids", "attention_mask"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_on_its_standard_example(name: str) -> None:
    kind, config, names = MODELS[name]
    example: Any = example_for(build_on_meta(getattr(transformers, kind), config()))
    assert set(example) == names
    model = getattr(transformers, kind)(config()).eval()
    with torch.no_grad():
        assert model(**example) is not None


def grown_elsewhere(config: Any, kind: str, inputs: dict[str, torch.Tensor], folder: Path, **options: Any) -> Any:
    """Grow MLPs on the disk; returns the report and the error of the logits, computed by Transformers alone."""
    model = shaken(getattr(transformers, kind)(config), 0).eval()
    model.save_pretrained(folder / "old")
    growth = outgrow.grow_checkpoint(folder / "old", Widen(kind="mlp", factor=1.5), out=folder / "new", **options)
    found = logits_elsewhere([folder / "new"], [inputs], folder)[0]
    with torch.no_grad():
        before = model(**inputs).logits
    return growth, float((found - before).abs().max() / before.abs().max())


def test_both_towers_of_a_model_with_images_in_texts_grow(tmp_path: Path) -> None:
    growth, error = grown_elsewhere(llava(), "LlavaForConditionalGeneration", family("llava").example(seed=3), tmp_path)
    assert error < 5e-6
    assert growth.comparison.agrees
    names = " ".join(change.volume for change in growth.plan.plan.changes)
    assert "vision_tower" in names
    assert "language_model" in names


def test_tokens_for_images_lie_within_a_vocabulary_that_is_cut(tmp_path: Path) -> None:
    """The brief comparison keeps 64 tokens; that of images is the last one."""
    config = llava(token=119)
    config.text_config.vocab_size = 120
    example = family("llava").example(seed=3)
    example["input_ids"][example["input_ids"] == 49] = 119
    growth, error = grown_elsewhere(config, "LlavaForConditionalGeneration", example, tmp_path)
    assert error < 5e-6
    assert "vision_tower" in " ".join(change.volume for change in growth.plan.plan.changes)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_an_example_comes_from_a_file(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**WAVE)).save_pretrained(tmp_path / "old")
    sound, path = {"input_values": torch.randn(1, 300, dtype=torch.float64)}, tmp_path / f"sound{ending}"
    save_file(sound, path) if ending == ".safetensors" else torch.save(sound, path)
    command = ["grow", str(tmp_path / "old"), "--widen", "mlp=1.5", "--dry-run"]
    assert main([*command, "--example", str(path)]) == 0
    assert "input_values=(1, 300) float32" in capsys.readouterr().out


def test_a_model_without_a_standard_example_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    config = transformers.TimesFmConfig(**sizes, architectures=["TimesFmModelForPrediction"])
    config.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "there is no standard example for TimesFmModelForPrediction: pass --example FILE" in shown
    assert "takes past_values, freq" in shown


def test_inspecting_takes_an_example_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr("outgrow.checkpoints.inspect_checkpoint.find_options", lambda cut: used.append(cut.example) or [])
    transformers.Wav2Vec2Config(**WAVE, architectures=["Wav2Vec2ForCTC"]).save_pretrained(tmp_path)
    torch.save({"input_values": torch.ones(1, 300)}, tmp_path / "sound.pt")
    assert main(["inspect", str(tmp_path), "--example", str(tmp_path / "sound.pt")]) == 0
    assert used[0]["input_values"].shape == (1, 300)
    with pytest.raises(
        CheckpointError, match="sound, which Wav2Vec2ForCTC does not take; its forward method takes input_values"
    ):
        outgrow.inspect_checkpoint(tmp_path, {"sound": torch.randn(1, 300)})


class Code:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


WRONG: dict[str, Any] = {
    "missing": (None, "there is no such file"),
    "code": ({"input_ids": Code()}, "code in it is not run"),
    "no names": (torch.ones(2), "holds no example"),
    "nested": ({"input_ids": [torch.ones(2)]}, "input_ids is of type list"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_without_an_example_is_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held, message = WRONG[case]
    path = tmp_path / "example.pt"
    if held is not None:
        torch.save(held, path)
    transformers.LlamaConfig(**GROUPED, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        outgrow.inspect_checkpoint(tmp_path, path)
    assert "code ran" not in capsys.readouterr().out


def test_tokens_of_a_given_example_may_lie_outside_of_the_first_ones(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": 200})
    example = {"input_ids": torch.tensor([[150, 199, 3, 77]])}
    growth, error = grown_elsewhere(config, "LlamaForCausalLM", example, tmp_path, example=example)
    assert error < 5e-6
    assert growth.comparison.agrees


BART = {"d_model": 16, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "vocab_size": 100, "max_position_embeddings": 32, "pad_token_id": 0}
BART |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
BOTH = (Widen(kind="width", factor=2, outputs="logits"), Widen(kind="heads", factor=2))
ENCODER_DECODERS = {
    "Bart": "BartForConditionalGeneration",
    "MBart": "MBartForConditionalGeneration",
    "Pegasus": "PegasusForConditionalGeneration",
    "Blenderbot": "BlenderbotForConditionalGeneration",
}
QUICK = ("Bart",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in ENCODER_DECODERS]
)
def test_models_that_read_masks_of_floats_grow_on_the_disk(name: str, tmp_path: Path) -> None:
    """BART reads a mask that its decoder makes by torch.ones. Its last norm is halved for the head, and thus compared too."""
    model = shaken(getattr(transformers, ENCODER_DECODERS[name])(getattr(transformers, f"{name}Config")(**BART)), 0).eval()
    model.save_pretrained(tmp_path / "old")
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids.flip(0)[:, :6]}
    example["attention_mask"][0, -3:] = 0
    for number, requests in enumerate([(Widen(kind="mlp", factor=1.5),), BOTH]):
        growth = outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / f"new{number}")
        assert growth.comparison is not None
        assert growth.comparison.agrees
        found = logits_elsewhere([tmp_path / f"new{number}"], [example], tmp_path)[0]
        with torch.no_grad():
            before = model(**example).logits
        assert (found - before).abs().max() < 1e-5 * before.abs().max()


def test_values_that_the_library_makes_at_loading_do_not_grow(tmp_path: Path) -> None:
    """Marian's positions are not in the file; after a growth of its width the library would make others."""
    model: Any = transformers.MarianMTModel(transformers.MarianConfig(**BART, decoder_vocab_size=100))
    shaken(model, 0)
    model.save_pretrained(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"embed_positions\.weight would grow, and it is not stored"):
        outgrow.grow_checkpoint(tmp_path / "old", *BOTH, out=tmp_path / "new", verify="none")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "old").eval()
    ids = torch.arange(3, 15).view(2, 6)
    growth = outgrow.grow(model, {"input_ids": ids, "decoder_input_ids": ids}, *BOTH)
    assert "embed_positions.weight is not saved, and the library would make other values" in str(growth)


def test_factors_that_the_library_derives_from_sizes_are_compared(tmp_path: Path) -> None:
    """PLBart multiplies its embeddings by √d_model, a number that is fixed when the model is built."""
    model: Any = shaken(transformers.PLBartForConditionalGeneration(transformers.PLBartConfig(**BART)), 0)
    model.save_pretrained(tmp_path / "old")
    with pytest.raises(CheckpointError, match=r"its code would call aten\.mul with 5\.65685 instead of 4"):
        outgrow.grow_checkpoint(tmp_path / "old", *BOTH, out=tmp_path / "new", verify="none")


def test_text_classifiers_with_a_decoder_have_a_standard_example(tmp_path: Path) -> None:
    """They read the state of the last token, which the example has."""
    model: Any = shaken(transformers.BartForSequenceClassification(transformers.BartConfig(**BART)), 0).eval()
    model.save_pretrained(tmp_path / "old")
    growth = outgrow.grow_checkpoint(tmp_path / "old", Widen(kind="mlp", factor=1.5), out=tmp_path / "new", verify="full")
    assert growth.comparison is not None
    assert growth.comparison.agrees
