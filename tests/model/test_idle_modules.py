"""Modules that do not run on the example grow with their peers, are reported, or are refused; other data still run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import distance

WIDTH, EXPERTS = 8, 4


class Experts(nn.Module):
    """Each sample is sent to one expert, whose index is its first feature, rounded."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number in which.unique().tolist():
            here = which == number
            result[here] = self.experts[number](x[here])
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        result: Tensor = x + self.moe(self.norm(x), which)
        return result


class Mixture(nn.Module):
    """A residual stream through blocks of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, which: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, which)
        result: Tensor = self.head(x)
        return result


def mixture() -> tuple[Mixture, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A model, an example that reaches one expert, and data that reach all."""
    torch.manual_seed(0)
    model = Mixture().double()
    x = torch.randn(12, 3, dtype=torch.float64)
    return model, (x, torch.ones(12, dtype=torch.long)), (x, torch.arange(12) % EXPERTS)


@pytest.mark.parametrize(
    "transform",
    [
        outgrow.Widen("stem", factor=2),
        outgrow.Widen("*", factor=2),
        outgrow.Widen("*.experts.*", by=2),
        outgrow.Deepen(after="blocks.0"),
        outgrow.Deepen(after="blocks.1", fade=5),
    ],
    ids=str,
)
def test_experts_that_the_example_does_not_reach_grow_too(transform: Any) -> None:
    model, example, data = mixture()
    before = model(*data).detach()
    growth = outgrow.grow(model, example, transform)
    assert distance(before, model(*data).detach()) < 1e-12
    model(*data).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    shapes = [[tuple(p.shape) for p in expert.parameters()] for block in model.blocks for expert in block.moe.experts]
    assert all(shape == shapes[0] for shape in shapes)
    (note,) = [note for note in growth.notes if "not run on the example" in note]
    assert "blocks.0.moe.experts.0, blocks.0.moe.experts.2, blocks.0.moe.experts.3" in note


def test_flops_do_not_count_idle_experts() -> None:
    model, example, data = mixture()
    lone = outgrow.widen(copy.deepcopy(model), example, "stem", factor=2).flops
    every = outgrow.widen(copy.deepcopy(model), data, "stem", factor=2).flops
    assert lone == every  # each sample reaches one expert


class Detour(nn.Module):
    """Sends marked samples through another layer, and has an unused table."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(3, WIDTH), Hidden(), nn.Linear(WIDTH, 2)
        self.rare, self.table = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor, marked: bool = False) -> Tensor:
        x = self.stem(x)
        if marked:
            x = x + self.rare(x)
        result: Tensor = self.head(x + self.body(x))
        return result


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x).relu())
        return result


def test_a_stream_that_an_idle_layer_may_read_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model, x = Detour().double(), torch.randn(5, 3, dtype=torch.float64)
    with pytest.raises(outgrow.GrowthError, match=r"rare\.weight, which the example does not run, may belong to it"):
        outgrow.widen(model, x, "stem", factor=2)
    before = model(x, True).detach()
    growth = outgrow.widen(model, x, "*", factor=2)  # of equal size, but inside a module that runs completely
    assert [change.volume for change in growth.plan.changes] == ["body.up"]
    assert distance(before, model(x, True).detach()) < 1e-12
    assert growth.notes == ("not run on the example: rare, table; left unchanged",)
    outgrow.widen(model, (x, True), "stem", factor=2)
    assert distance(before, model(x, True).detach()) < 1e-12


def test_experts_of_different_shapes_are_refused_by_name() -> None:
    model, example, data = mixture()
    model.blocks[1].moe.experts[3] = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double()
    before = model(*data).detach()
    with pytest.raises(outgrow.GrowthError, match=r"blocks\.1\.moe\.experts\.3\.0\.weight, which the example does not run"):
        outgrow.widen(model, example, "stem", factor=2)
    assert torch.equal(model(*data), before)
    outgrow.widen(model, data, "stem", factor=2)
    assert distance(before, model(*data).detach()) < 1e-12


@pytest.mark.parametrize("where", ["*", "model.embed_tokens", "*.experts*"])
def test_mixtral_with_eager_experts_runs_on_data_that_reach_others(where: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    one, data = torch.full((1, 2), 7), torch.randint(0, 50, (4, 12))
    with torch.no_grad():
        before = model(data).logits
        outgrow.widen(model, {"input_ids": one}, where, factor=2)
        assert distance(before, model(data).logits) < 1e-5
