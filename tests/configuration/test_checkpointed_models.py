"""Gradient checkpointing is a setting of the user's, in each layer, that no configuration describes and none has to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow

transformers = pytest.importorskip("transformers")

IDS = {"input_ids": torch.arange(12).view(2, 6)}
GROWTHS: dict[str, tuple[Any, str, int]] = {
    "wider": (outgrow.Widen(kind="mlp", factor=1.5), "intermediate_size", 36),
    "deeper": (outgrow.Deepen("model.layers.0"), "num_hidden_layers", 3),
}


def moved(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.filterwarnings("ignore:.*checkpointing.* is deprecated:FutureWarning")
@pytest.mark.parametrize("layers", [slice(None), slice(1)], ids=["all layers", "one layer"])
@pytest.mark.parametrize("growth", GROWTHS)
def test_a_model_with_gradient_checkpointing_is_saved_and_loaded_by_its_library(
    growth: str, layers: slice, tmp_path: Path
) -> None:
    """Transformers sets an attribute of each layer that a newly built one has in its class only."""
    request, field, size = GROWTHS[growth]
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    model = moved(transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).eval())
    model.gradient_checkpointing_enable()
    for layer in list(model.model.layers)[layers.stop :] if layers.stop else ():
        del layer.gradient_checkpointing
    before = model(**IDS).logits
    report = str(outgrow.grow(model, IDS, request))
    assert getattr(model.config, field) == size
    assert "does not describe" not in report
    assert f"{field} {small[field]} → {size}" in report
    assert all(layer.gradient_checkpointing for layer in list(model.model.layers)[:1])
    moved(model)  # new blocks are the identity until they are trained
    assert not torch.allclose(model(**IDS).logits, before)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**IDS).logits, model(**IDS).logits)
