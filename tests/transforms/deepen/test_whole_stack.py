"""`Deepen(layers=…)`: a whole stack, to a given number of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import SelectionError
from tests.helpers import home_made_models as home
from tests.helpers.library_models import FAMILIES, shaken

BY_NAME = {str(family): family for family in FAMILIES}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, home.VOCABULARY, (2, home.LENGTH), generator=torch.Generator().manual_seed(0))


def gpt(layers: int = 3, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shaken(home.GPT(layers=layers, **options), 0).double()


def sources(model: nn.Module, weights: list[Tensor]) -> str:
    """For each block, the letter of the original with the same weight."""
    return "".join(
        next("abcdef"[i] for i, weight in enumerate(weights) if torch.equal(block.mlp.up.weight, weight))
        for block in model.blocks
    )


ORDERS = [
    ("interleave", 6, "aabbcc"),
    ("interleave", 9, "aaabbbccc"),
    ("interleave", 4, "abcc"),
    ("interleave", 5, "abbcc"),
    ("stack", 6, "abcabc"),
    ("stack", 5, "abcab"),
    ("stack", 8, "abcabcab"),
]


@pytest.mark.parametrize(("order", "layers", "expected"), ORDERS)
def test_order_of_the_copies(order: str, layers: int, expected: str, tokens: Tensor) -> None:
    model = gpt()
    weights = [block.mlp.up.weight.detach().clone() for block in model.blocks]
    before = model(tokens)
    growth = outgrow.grow(model, tokens, outgrow.Deepen(layers=layers, order=order, fade=4))
    assert sources(model, weights) == expected
    torch.testing.assert_close(model(tokens), before)  # the gates of the copies are closed
    (change,) = growth.plan.changes
    assert (change.volume, change.old, change.new) == ("blocks", 3, layers)


@pytest.mark.parametrize("order", ["interleave", "stack"])
def test_zeroed_copies_keep_the_function(order: str, tokens: Tensor) -> None:
    model = gpt()
    before = model(tokens)
    optimizer = torch.optim.AdamW(model.parameters())
    before.sum().backward()
    outgrow.deepen(model, tokens, layers=7, order=order, optimizer=optimizer)
    assert len(model.blocks) == 7
    torch.testing.assert_close(model(tokens), before)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "layers", "count"), [("llama", 4, "num_hidden_layers"), ("gpt2", 5, "n_layer"), ("gemma2", 8, "num_hidden_layers")]
)
def test_a_library_model_and_its_configuration(name: str, layers: int, count: str) -> None:
    family = BY_NAME[name]
    model, example = family.build(), family.example()
    before = model(**example).logits
    outgrow.grow(model, example, outgrow.Deepen(layers=layers))
    assert getattr(model.config, count) == layers
    torch.testing.assert_close(model(**example).logits, before, rtol=1e-4, atol=1e-4)
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(**example).logits, before, rtol=1e-4, atol=1e-4)


def test_kinds_of_blocks_keep_alternating() -> None:
    family = BY_NAME["gemma2"]  # local and global attention in turn
    model, example = family.build(), family.example()
    weights = [layer.mlp.up_proj.weight.detach().clone() for layer in model.model.layers]
    outgrow.grow(model, example, outgrow.Deepen(layers=8, fade=3))
    found = [
        next("abcd"[i] for i, weight in enumerate(weights) if torch.equal(layer.mlp.up_proj.weight, weight))
        for layer in model.model.layers
    ]
    assert "".join(found) == "ababcdcd"
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 4


def test_several_stacks_are_refused_by_name() -> None:
    family = BY_NAME["whisper"]
    model, example = family.build(), family.example()
    with pytest.raises(SelectionError, match=r"2 stacks: choose one of stack='model.encoder.layers' \(2 blocks\), stack="):
        outgrow.grow(model, example, outgrow.Deepen(layers=4))
    before = model(**example).logits
    outgrow.grow(model, example, outgrow.Deepen(layers=4, stack="model.decoder.layers"))
    assert (len(model.model.encoder.layers), len(model.model.decoder.layers)) == (2, 4)
    torch.testing.assert_close(model(**example).logits, before, rtol=1e-4, atol=1e-4)


def test_refusals_leave_the_model_as_it_was(tokens: Tensor) -> None:
    model = gpt()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(outgrow.GrowthError, match="blocks has 3 blocks already: layers=3 would not deepen it"):
        outgrow.deepen(model, tokens, layers=3)
    with pytest.raises(SelectionError, match="stack='heads' is no container of blocks; stacks of this model: 'blocks'"):
        outgrow.deepen(model, tokens, layers=6, stack="heads")
    with pytest.raises(outgrow.GrowthError, match=r"the stack can't be deepened\n  - blocks: (.|\n)*with fade="):
        outgrow.deepen(gpt(post_norm=True), tokens, layers=6)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(SelectionError, match="no stack of equal blocks"):
        outgrow.deepen(plain, torch.randn(2, 4), layers=6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


WRONG = [
    ({}, "write after=, the path of a module"),
    ({"after": ""}, "write after=, the path of a module"),
    ({"layers": 0}, "layers=0: write the new number of blocks"),
    ({"layers": 2.5}, "layers=2.5: write the new number of blocks"),
    ({"layers": 6, "count": 2}, "leave count= out"),
    ({"layers": 6, "order": "zip"}, "write 'interleave'"),
    ({"layers": 6, "stack": ""}, "write the path of a container"),
    ({"layers": 6, "method": "netmorph"}, "name a place with after="),
    ({"after": "blocks.1", "stack": "blocks"}, "leave after= out"),
    ({"after": "blocks.1", "layers": 3, "order": "stack"}, "leave after= out"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(outgrow.GrowthError, match=message):
        outgrow.Deepen(**options)


def test_layers_with_a_place_still_build_a_residual_block(tokens: Tensor) -> None:
    model = gpt(layers=2)
    outgrow.deepen(model, tokens, "norm", layers=3)
    assert isinstance(model.norm[1], outgrow.ResidualBlock)


def test_a_schedule_file_holds_the_number_of_layers(tokens: Tensor, tmp_path: Path) -> None:
    requests = [outgrow.Deepen(layers=6, order="stack", stack="blocks", fade=5), outgrow.Deepen(after="norm", layers=3)]
    schedule = outgrow.Schedule([outgrow.At(step=1, grow=requests[:1]), outgrow.At(step=2, grow=requests[1:])])
    schedule.to_file(tmp_path / "schedule.toml")
    again = outgrow.Schedule.from_file(tmp_path / "schedule.toml")
    assert again == schedule
    assert str(again) == "step 1: Deepen 'blocks' to 6 layers (a b a b)\nstep 2: Deepen after 'norm' + 1"
    model = gpt()
    run = outgrow.Run(model, tokens, torch.optim.SGD(model.parameters(), lr=0.1), again, quiet=True)
    run.step(torch.tensor(1.0))
    assert len(model.blocks) == 6


def test_width_and_depth_in_one_growth(tokens: Tensor) -> None:
    model = gpt(attention=home.TorchAttention)
    before = model(tokens)
    outgrow.grow(model, tokens, outgrow.Deepen(layers=5), outgrow.Widen(kind="mlp", factor=1.5))
    assert [block.mlp.up.out_features for block in model.blocks] == [60] * 5
    torch.testing.assert_close(model(tokens), before)
