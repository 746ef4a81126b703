"""Fields that describe sizes by lists and ratios follow a growth; the judge is the library, which loads what was saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow.configuration.lists_and_ratios import new_lists, new_ratios
from tests.helpers.judging import distance
from tests.helpers.random_weights import randomise_parameters

transformers = pytest.importorskip("transformers")

STAGES = {"depths": [2, 2], "num_labels": 5}
SWIN = {**STAGES, "image_size": 16, "patch_size": 2, "embed_dim": 8, "num_heads": [2, 4], "window_size": 4, "mlp_ratio": 3.0}
ONE_STAGE = {**SWIN, "depths": [2], "num_heads": [2], "embed_dim": 12}
PYRAMID = {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 4]}
PYRAMID |= {"image_size": 16, "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "mlp_ratios": [2, 3]}
DINO = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8, "image_size": 16, "num_labels": 5}
CONVNEXT = {**STAGES, "num_stages": 2, "image_size": 16, "patch_size": 2, "hidden_sizes": [8, 12]}
RESNET = {**STAGES, "embedding_size": 8, "hidden_sizes": [12, 16], "layer_type": "basic"}
MLPS, ALL = outgrow.Widen(kind="mlp", factor=1.5), outgrow.Widen("*", factor=2)


@dataclass(frozen=True)
class Case:
    name: str
    options: dict[str, Any]
    request: Any
    found: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name} {self.request.summary}"


CASES = [
    Case("Swin", SWIN, MLPS, {"mlp_ratio": 4.5, "embed_dim": 8}),
    Case("Dinov2", {**DINO, "mlp_ratio": 2}, MLPS, {"mlp_ratio": 3}),
    Case("Swin", ONE_STAGE, outgrow.Widen(kind="mlp", to=50), {"mlp_ratio": pytest.approx(50 / 12)}),
    Case("PvtV2", PYRAMID, outgrow.Widen(kind="mlp", factor=2), {"mlp_ratios": [4, 6], "hidden_sizes": [8, 16]}),
    Case("ConvNext", CONVNEXT, ALL, {"hidden_sizes": [16, 24]}),
    Case("ResNet", RESNET, ALL, {"hidden_sizes": [24, 32], "embedding_size": 16}),
]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_and_ratios_follow(case: Case, tmp_path: Path) -> None:
    config = getattr(transformers, f"{case.name}Config")(**case.options)
    model = randomise_parameters(getattr(transformers, f"{case.name}ForImageClassification")(config)).eval()
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = model(pixels).logits
    with torch.enable_grad():
        growth = outgrow.grow(model, pixels[:2], case.request)
    assert {name: getattr(model.config, name) for name in case.found} == case.found, growth
    model.save_pretrained(tmp_path)
    again, problems = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems.values())
    assert distance(before, again.eval()(pixels).logits) < 1e-5
    one, other = (randomise_parameters(each, 7)(pixels).logits for each in (model, again))
    assert torch.equal(one, other)


def reached(value: float) -> list[Any]:
    return {8: [16, 32], 16: [32], 24: [25]}.get(int(value), [])


def test_values_of_lists_and_ratios() -> None:
    assert new_lists([8, 12, 16], reached) == [[16, 12, 32], [32, 12, 32]]
    assert new_lists((5, 6), reached) == []
    assert new_lists("8", reached) == []
    assert new_ratios("mlp_ratio", 3, {"embed_dim": 8}, reached) == [25 / 16, 25 / 8, 1.5]
    assert new_ratios("mlp_ratio", 3, {"embed_dim": 5}, reached) == []
    assert new_ratios("mlp_ratios", [3, 2], {"sizes": [8, 5]}, reached)[1] == [25 / 8, 2]
    for hidden in range(1, 98):
        found = new_ratios("mlp_ratio", 2, {"dim": 49}, lambda size, hidden=hidden: [hidden] if size == 98 else [])
        assert any(int(49 * one) == hidden for one in found)
    assert new_ratios("drop_ratio", 3, {"embed_dim": 8}, reached) == []
