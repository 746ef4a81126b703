"""Volumes that share a size in the code with one that can't grow are listed with that reason, and no others are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow


class Rotary(nn.Module):
    """Attention with rotated queries and keys; values are split by the same sizes, or by a number of their own."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.head, self.value_head = own, 4, 4
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        sizes = (*x.shape[:-1], -1, self.head)
        angle = torch.outer(torch.arange(x.shape[1]), torch.arange(2) + 1.0).to(x)
        cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

        def rotated(t: Tensor) -> Tensor:
            one, two = t.chunk(2, -1)
            return t * cos + torch.cat([-two, one], -1) * sin

        q, k = (rotated(layer(x).view(sizes)).transpose(1, 2) for layer in (self.q, self.k))
        v = self.v(x).view((*x.shape[:-1], 2, self.value_head) if self.own else sizes).transpose(1, 2)
        attended = torch.softmax(q @ k.transpose(2, 3) / 2, -1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("own", [False, True])
def test_a_value_head_is_doubted_only_where_its_size_is_that_of_the_queries(own: bool) -> None:
    model, x = nn.Sequential(Rotary(own)), torch.randn(2, 5, 8)
    doubted = {volume.name for volume in outgrow.volumes(model, x) if "may be refused" in volume.reason}
    assert doubted == (set() if own else {"0.v"})
    if own:
        assert outgrow.widen(model, x, "0.v", factor=2).preserving
    else:
        with pytest.raises(outgrow.GrowthError, match="does not follow its size"):
            outgrow.widen(model, x, "0.v", factor=2)


def test_the_value_heads_of_a_llama_are_doubted_in_every_layer() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2, "vocab_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    x = {"input_ids": torch.randint(0, 50, (2, 6))}
    volumes = {volume.name: volume for volume in outgrow.volumes(model, x)}
    doubted = {name: volume.reason for name, volume in volumes.items() if "may be refused" in volume.reason}
    layers = [f"model.layers.{number}.self_attn" for number in range(5)]
    assert doubted == {
        f"{layer}.v_proj": f"a growth of it alone may be refused: the code of {layer} gives it the same size as "
        "model.rotary_emb, which grows by whole factors of kind='head_dim'"
        for layer in layers
    }
    for layer in (layers[0], layers[4]):
        with pytest.raises(outgrow.GrowthError, match="does not follow its size"):
            outgrow.widen(copy.deepcopy(model), x, f"{layer}.v_proj", factor=2)
    assert outgrow.widen(copy.deepcopy(model), x, "model.layers.4.mlp.gate_proj", factor=2).preserving
