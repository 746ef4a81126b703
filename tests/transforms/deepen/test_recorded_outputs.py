"""Libraries record the outputs of new blocks like those of the others, and new blocks contribute to the model's outputs.

Transformers records hidden states by hooks, which it adds to a model's layers at the first pass that needs them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.modules.gates import without_gates

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {"vocab_size": 50, **SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
IDS = {"input_ids": torch.arange(3, 15).view(2, 6)}


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


def llava() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of images and text that takes the output of its last vision layer from what was recorded."""
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**LLAMA)
    vision = transformers.CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    sizes: dict[str, Any] = {"image_token_id": 49, "vision_feature_layer": -1}
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, **sizes)
    )
    ids = torch.randint(3, 48, (2, 10))
    ids[:, 2:6] = 49  # where the image goes
    return model.eval(), {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16)}


def hidden_states(model: nn.Module) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return model(**IDS, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("fade", [None, 4])
def test_hidden_states_of_a_new_block_are_recorded_once(fade: int | None, tmp_path: Path) -> None:
    model = llama()
    assert len(hidden_states(model)) == 3
    outgrow.deepen(model, IDS, "model.layers.0", fade=fade)
    outgrow.deepen(model, IDS, "model.layers.0", fade=fade)
    without_gates(model)
    found = hidden_states(model)
    model.save_pretrained(tmp_path)
    again = hidden_states(type(model).from_pretrained(tmp_path).eval())
    assert len(found) == len(again) == 5
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_what_a_library_adds_in_a_trial_pass_does_not_stay() -> None:
    model, example = llama(), {**IDS, "output_hidden_states": True}
    outgrow.volumes(model, example)
    assert not any(module._forward_hooks for module in model.modules())
    assert len(hidden_states(model)) == 3
    outgrow.widen(model, example, "*.mlp.*", factor=2)
    assert len(hidden_states(model)) == 3


@pytest.mark.parametrize("before", [True, False])
def test_llava_learns_in_a_block_behind_its_last_vision_layer(before: bool, tmp_path: Path) -> None:
    model, example = llava()
    if before:
        model(**example)
    outgrow.deepen(model, example, "model.vision_tower.encoder.layers.1")
    model(**example).logits.square().sum().backward()
    new = dict(model.model.vision_tower.encoder.layers[2].named_parameters())
    assert all(parameter.grad is not None for parameter in new.values())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for one in (model, again):
            for parameter in one.model.vision_tower.encoder.layers[2].parameters():
                parameter.add_(0.3)  # so that it is no longer the identity
        assert torch.allclose(model(**example).logits, again(**example).logits, atol=1e-6)


class Early(nn.Module):
    """Returns the output of its last block but one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x := block(x) for block in self.blocks]
        return seen[1]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.f(x)
        return result


def test_a_block_on_which_no_output_depends_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Early(), torch.randn(3, 4)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(outgrow.GrowthError, match=r"blocks\.2: none of the model's outputs on the example depends on"):
        outgrow.deepen(model, x, "blocks.1")
    with pytest.raises(outgrow.GrowthError, match="never learn"):
        outgrow.deepen(model, x, "blocks.2", fade=3)
    assert list(model.state_dict()) == list(before)
    outgrow.deepen(model, x, "blocks.0", method="copy")
