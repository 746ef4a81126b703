"""The grown model runs once in eval mode: to compare it with the model rebuilt from its configuration, and to check outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import outgrow

LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 20}


def test_a_growth_of_a_library_model_makes_two_passes_before_and_two_after() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    modes: list[str] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not any(parameter.is_meta for parameter in module.parameters()):
            modes.append("train" if module.training else "eval")

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    growth = outgrow.widen(model, {"input_ids": torch.arange(8).view(2, 4)}, "*", factor=1.5)
    handle.remove()
    assert modes == ["eval", "train", "eval", "train"]
    assert model.config.hidden_size == 24
    assert growth.max_error < 1e-5


class Config:
    """A configuration whose width the model's code also reads when it runs."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))


class Scaled(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.first, self.last = nn.Linear(3, config.hidden_size), nn.Linear(config.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.relu(self.first(x))) / self.config.hidden_size**0.5
        return y


def test_a_configuration_that_would_change_outputs_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Scaled(Config(8)), torch.randn(5, 3)
    before = model(x)
    growth = outgrow.widen(model, x, "first", to=12)
    assert model.first.out_features == 12
    assert model.config.hidden_size == 8
    torch.testing.assert_close(model(x), before)
    assert "config: it does not describe the grown model" in str(growth)
