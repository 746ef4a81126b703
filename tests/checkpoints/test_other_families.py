"""Checkpoints of further families grow on the disk: what was found by trying them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow import Deepen, Widen
from outgrow.checkpoints.standard_examples import example_for
from tests.helpers.checkpoints import logits_elsewhere
from tests.helpers.library_models import GROUPED, IMAGE, SIZES, TEXT, TOKENS, shaken

transformers = pytest.importorskip("transformers")

MLP, LAYERS = {**SIZES, "num_hidden_layers": 4}, Deepen(layers=6)
MAMBA = {**TOKENS, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4, "time_step_rank": 4, "intermediate_size": 32}
DINO = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, **IMAGE}
BAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
CASES: dict[str, Any] = {  # class, configuration, options, request
    "a block number at another place in the file": ("BeitForImageClassification", "BeitConfig", {**MLP, **IMAGE}, LAYERS),
    "a buffer that nothing reads": ("FalconMambaForCausalLM", "FalconMambaConfig", MAMBA, Widen(kind="mlp", factor=1.5)),
    "stages that can't be cut": ("Dinov2ForImageClassification", "Dinov2Config", DINO, LAYERS),
    "a head over all layers": (
        "EsmForMaskedLM",
        "EsmConfig",
        {**TEXT, "num_hidden_layers": 4, "mask_token_id": 4, "position_embedding_type": "rotary"},
        Widen(kind="mlp", factor=1.5),
    ),
    "layers that can't run alone": (
        "BambaForCausalLM",
        "BambaConfig",
        {**GROUPED, **BAMBA, "num_hidden_layers": 4, "mamba_chunk_size": 4},
        LAYERS,
    ),
}
QUICK = ("a block number at another place in the file", "a buffer that nothing reads", "stages that can't be cut")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_a_family_grows_on_the_disk(case: str, tmp_path: Path) -> None:
    kind, config, options, request = CASES[case]
    model = shaken(getattr(transformers, kind)(getattr(transformers, config)(**options)), 0).eval()
    model.save_pretrained(tmp_path / "old")
    growth = outgrow.grow_checkpoint(tmp_path / "old", request, out=tmp_path / "new")
    assert growth.comparison is not None
    assert growth.comparison.agrees
    example: Any = example_for(model)
    other = {name: value.flip(0) if value.is_floating_point() else value.flip(-1) for name, value in example.items()}
    found = logits_elsewhere([tmp_path / "new"], [other], tmp_path)[0]
    with torch.no_grad():
        before = model(**other).logits
    assert (found - before).abs().max() < 1e-5 * before.abs().max()
