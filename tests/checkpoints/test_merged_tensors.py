"""Mixtures of experts on the disk: a tensor per expert in the files, one for all of them in the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow import Deepen, Widen
from outgrow.checkpoints import merged_tensors
from outgrow.errors import CheckpointError
from tests.helpers.checkpoints import family, save_small, tensors_in

pytest.importorskip("transformers.core_model_loading")

MLP, HEADS, WIDTH = Widen(kind="mlp", factor=2), Widen(kind="heads", by=2), Widen(kind="width", factor=1.5)
CASES: dict[str, tuple[str, list[Any]]] = {
    "mixtral": ("mixtral", [MLP, HEADS, WIDTH, Deepen(layers=6)]),
    "qwen3moe": ("qwen3moe", [MLP, Deepen(layers=6)]),
    "qwen2moe": ("qwen2moe", [MLP, WIDTH]),
}


@pytest.mark.parametrize("case", ["mixtral", "qwen3moe", pytest.param("qwen2moe", marks=pytest.mark.exhaustive)])
def test_experts_are_streamed_in_the_form_of_the_files(case: str, tmp_path: Path) -> None:
    name, requests = CASES[case]
    model = save_small(name, tmp_path / "old", shard="20KB")
    outgrow.grow_checkpoint(tmp_path / "old", *requests, out=tmp_path / "new", seed=3, shard_size=30_000)
    expected = copy.deepcopy(model)
    outgrow.grow(expected, family(name).example(), *requests, seed=3, check=False)
    expected.save_pretrained(tmp_path / "expected")
    found, wanted = tensors_in(tmp_path / "new"), tensors_in(tmp_path / "expected")
    assert found.keys() == wanted.keys()
    assert any(".experts.2." in one for one in found)
    for key, value in found.items():
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=0)
    loaded, example = type(model).from_pretrained(tmp_path / "new").eval(), family(name).example(seed=5)
    with torch.no_grad():
        before, after = model.eval()(**example).logits, loaded(**example).logits
    assert (after - before).abs().max() < 5e-6 * before.abs().max()


def test_files_with_merged_experts_keep_that_form(tmp_path: Path) -> None:
    model: Any = family("mixtral").build()
    model.save_pretrained(tmp_path / "old", save_original_format=False)
    outgrow.grow_checkpoint(tmp_path / "old", MLP, out=tmp_path / "new")
    found = tensors_in(tmp_path / "new")
    assert found.keys() == tensors_in(tmp_path / "old").keys()
    assert (
        found["model.layers.0.mlp.experts.gate_up_proj"].shape[1] == 2 * model.model.layers[0].mlp.experts.gate_up_proj.shape[1]
    )


def test_an_expert_that_is_missing_is_reported(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_small("mixtral", tmp_path / "old")
    tensors = tensors_in(tmp_path / "old")
    del tensors["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
    save_file(tensors, tmp_path / "old" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: it has the shape \(2, "):
        outgrow.grow_checkpoint(tmp_path / "old", MLP, out=tmp_path / "new")


def test_tensors_that_are_merged_in_an_unknown_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small("mixtral", tmp_path / "old")
    monkeypatch.setattr(merged_tensors, "MERGED", [("Transpose", 0)])
    with pytest.raises(CheckpointError, match=r"merges or splits it when it loads(.|\n)*save_original_format=False"):
        outgrow.grow_checkpoint(tmp_path / "old", MLP, out=tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"old"}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product, and all sizes run")
def test_sizes_that_do_not_run_in_the_dtype_of_the_file_are_refused(tmp_path: Path) -> None:
    save_small("mixtral", tmp_path / "old", torch.bfloat16)
    for by, fits in ((4, False), (8, True)):
        request = Widen(kind="mlp", by=by)
        if fits:
            outgrow.grow_checkpoint(tmp_path / "old", request, out=tmp_path / "new")
            model: Any = family("mixtral").build()
            type(model).from_pretrained(tmp_path / "new", dtype=torch.bfloat16)(**family("mixtral").example())
        else:
            with pytest.raises(CheckpointError, match=r"would not run in torch\.bfloat16"):
                outgrow.grow_checkpoint(tmp_path / "old", request, out=tmp_path / "new")


@pytest.mark.exhaustive
def test_the_training_state_of_experts_grows_along(tmp_path: Path) -> None:
    from tests.helpers.trainer_checkpoints import SAVED, losses_of, resumed

    plain = losses_of(family("mixtral").build().train(), tmp_path / "old")
    growth = [MLP, Deepen(layers=6)]
    outgrow.grow_checkpoint(tmp_path / "old" / f"checkpoint-{SAVED}", *growth, out=tmp_path / "new", training_state=True)
    found = resumed(tmp_path / "new", tmp_path / "run")
    assert found[0] == pytest.approx(plain[SAVED], rel=1e-5)
    assert found[1:] != plain[SAVED + 1 :]
