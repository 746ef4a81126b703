"""Checkpoints that are not complete, not safetensors, or not what their configuration says: refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow.checkpoints.read_checkpoint import INDEX, WEIGHTS, read_checkpoint
from outgrow.errors import CheckpointError
from tests.helpers.checkpoints import save_small, tensors_in

pytest.importorskip("transformers")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a checkpoint that has one file."""
    from safetensors.torch import save_file

    tensors = tensors_in(folder)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})


def one_more_in_index(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x"] = shards(folder)[0].name
    (folder / INDEX).write_text(json.dumps(index))


def shorten(folder: Path, count: int) -> None:
    """Remove bytes from the end of a shard, or add some."""
    content = shards(folder)[0].read_bytes()
    shards(folder)[0].write_bytes(content[:-count] if count > 0 else content + bytes(-count))


def without(folder: Path, field: str) -> None:
    """Remove a field of the configuration."""
    config = json.loads((folder / "config.json").read_text())
    del config[field]
    (folder / "config.json").write_text(json.dumps(config))


def rename_dtype(folder: Path) -> None:
    """Give a tensor a dtype of 8 bits, as quantised checkpoints have it."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"F8X"', 1))


SHARDED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing shard": (lambda folder: shards(folder)[1].unlink(), "the shard is missing"),
    "a truncated shard": (lambda folder: shorten(folder, 7), "is truncated"),
    "an empty shard": (lambda folder: shards(folder)[0].write_bytes(b""), "truncated, or not a safetensors file"),
    "bytes at the end": (lambda folder: shorten(folder, -8), "bytes that no tensor owns"),
    "another file": (lambda folder: shards(folder)[0].write_bytes(b"\x80\x02" * 50), "truncated, or not a safetensors file"),
    "an index with one more": (one_more_in_index, "contradicts the files"),
    "no index": (lambda folder: (folder / INDEX).unlink(), "no index of shards"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"it has no config\.json"),
    "adapters": (lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"), "holds adapters of PEFT"),
    "a damaged config": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json can't be read"),
}
WHOLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"), "as pickle"),
    "another class": (lambda folder: set_config(folder, architectures=["NoSuchModel"]), "no such class"),
    "another family": (lambda folder: set_config(folder, model_type="no-such-type"), "does not contain"),
    "an unknown dtype": (rename_dtype, "has the dtype F8X, which can't be grown; known: F64, F32"),
    "no class in the config": (lambda folder: without(folder, "architectures"), "write the class that the weights belong to"),
    "no family in the config": (lambda folder: without(folder, "model_type"), "config.json has the model_type None"),
    "no size in the config": (lambda folder: without(folder, "intermediate_size"), r"and \(11008, 16\) by the configuration"),
    "quantised": (lambda folder: set_config(folder, quantization_config={"bits": 4}), "weights are quantised"),
    "another size": (lambda folder: set_config(folder, intermediate_size=32), r"and \(32, 16\) by the configuration"),
    "a missing tensor": (lambda folder: rewrite(folder, lambda t: t.__delitem__("model.norm.weight")), "needs it"),
    "an unknown tensor": (lambda folder: rewrite(folder, lambda t: t.update(x=torch.zeros(2))), "x: LlamaForCausalLM has no"),
}


@pytest.mark.parametrize("case", [*SHARDED, *WHOLE])
def test_a_bad_checkpoint_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    change, reason = {**SHARDED, **WHOLE}[case]
    save_small("llama", tmp_path / "old", shard="20KB" if case in SHARDED else "5GB")
    change(tmp_path / "old")
    with pytest.raises(CheckpointError, match=reason):
        outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen("*.mlp.*", factor=1.5), out=tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


def test_headers_describe_all_tensors(tmp_path: Path) -> None:
    save_small("llama", tmp_path, torch.bfloat16, shard="8KB")
    found, tensors = read_checkpoint(tmp_path), tensors_in(tmp_path)
    assert {name: one.shape for name, one in found.tensors.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    assert found.dtype == torch.bfloat16
    assert found.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert len(found.files) == len(shards(tmp_path)) > 1


def test_names_without_the_prefix_of_the_base_model_are_kept(tmp_path: Path) -> None:
    """GPT-2's own checkpoint stores `h.0.…` and masks as buffers, although its class is the one with a head."""
    model: Any = save_small("gpt2", tmp_path / "old")

    def unprefixed(tensors: dict[str, torch.Tensor]) -> None:
        old = dict(tensors)
        tensors.clear()
        tensors.update({name.removeprefix("transformer."): value for name, value in old.items()})
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    rewrite(tmp_path / "old", unprefixed)
    growth = outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen("*.mlp.*", factor=1.5), out=tmp_path / "new")
    assert "h.0.mlp.c_fc.weight" in tensors_in(tmp_path / "new")
    assert growth.plan.names.ignored == ("h.0.attn.bias",)
    ids = torch.arange(3, 11)[None]
    new = type(model).from_pretrained(tmp_path / "new").eval()
    with torch.no_grad():
        torch.testing.assert_close(new(ids).logits, model.eval()(ids).logits, rtol=1e-5, atol=1e-5)


def test_buffers_that_the_library_computes_are_left_out(tmp_path: Path) -> None:
    """Earlier versions of Transformers stored them: `embeddings.position_ids` of BERT."""
    save_small("llama", tmp_path / "old")
    name = "model.rotary_emb.original_inv_freq"
    rewrite(tmp_path / "old", lambda tensors: tensors.update({name: torch.ones(2)}))
    growth = outgrow.grow_checkpoint(
        tmp_path / "old", outgrow.Widen("*.mlp.*", factor=1.5), out=tmp_path / "new", verify="none"
    )
    assert growth.plan.names.ignored == (name,)
    assert name not in tensors_in(tmp_path / "new")


def test_tied_tensors_with_different_values_are_refused_with_the_way_out(tmp_path: Path) -> None:
    save_small("llama", tmp_path / "old")
    set_config(tmp_path / "old", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"ties .* but their stored values differ(.|\n)*\"tie_word_embeddings\": false"):
        outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen(kind="mlp", factor=1.5), out=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    rewrite(tmp_path / "old", lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"].clone()}))
    grown = outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen(kind="mlp", factor=1.5), out=tmp_path / "new")
    assert grown.comparison is not None
    assert grown.comparison.agrees


def test_a_model_that_reads_values_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """ViLT draws the patches that it uses."""
    import torch
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50}
    config = transformers.ViltConfig(**sizes, image_size=16, patch_size=8, max_position_embeddings=32)
    transformers.ViltForQuestionAnswering(config).save_pretrained(tmp_path / "old")
    example = {"input_ids": torch.ones(2, 5, dtype=torch.long), "pixel_values": torch.randn(2, 3, 16, 16)}
    with pytest.raises(CheckpointError, match=r"planned without weights(.|\n)*grow it by outgrow\.grow"):
        outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen(kind="mlp", factor=1.5), out=tmp_path / "new", example=example)
    with pytest.raises(CheckpointError, match="planned without weights"):
        outgrow.inspect_checkpoint(tmp_path / "old", example)
    with pytest.raises(CheckpointError, match="there is no standard example for ViltForQuestionAnswering; it does not run on"):
        outgrow.inspect_checkpoint(tmp_path / "old")


def test_an_output_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    save_small("llama", tmp_path / "old")
    with pytest.raises(outgrow.GrowthError, match="the model returns no such output"):
        outgrow.grow_checkpoint(tmp_path / "old", outgrow.Widen(kind="mlp", factor=1.5, outputs="nope"), out=tmp_path / "new")


@pytest.mark.parametrize("name", ["SiglipForImageClassification", "BlipForConditionalGeneration"])
def test_models_with_a_vision_part_have_an_example(name: str, tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    text = {**sizes, "vocab_size": 50, "max_position_embeddings": 32}
    kind = getattr(transformers, name)
    model = kind(kind.config_class(text_config=text, vision_config=vision))
    model.save_pretrained(tmp_path / "old")
    requests = [outgrow.Widen("*.fc1", factor=1.5)]
    grown = outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / "new")
    assert grown.comparison is not None
    assert grown.comparison.agrees
