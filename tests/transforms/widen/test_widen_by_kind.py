"""`Widen(kind=…)`: all volumes of one kind."""

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


def gpt(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shaken(home.GPT(**options), 0).double()


def test_all_mlps_grow(tokens: Tensor) -> None:
    model = gpt()
    before = model(tokens)
    growth = outgrow.grow(model, tokens, outgrow.Widen(kind="mlp", factor=1.5))
    assert [block.mlp.up.out_features for block in model.blocks] == [60, 60]
    assert [change.volume for change in growth.plan.changes] == ["blocks.0.mlp.gate", "blocks.1.mlp.gate"]
    torch.testing.assert_close(model(tokens), before)


def test_several_kinds_grow_at_once(tokens: Tensor) -> None:
    model = gpt(attention=home.TorchAttention)
    before = model(tokens)
    requests = outgrow.Widen(kind="mlp", by=8), outgrow.Widen(kind="heads", by=2), outgrow.Widen(kind="width", to=36)
    growth = outgrow.grow(model, tokens, *requests)
    sizes = {change.volume: (change.old, change.new) for change in growth.plan.changes}
    assert sizes["tokens"] == (24, 36)
    assert sizes["blocks.0.mlp.gate"] == sizes["blocks.1.mlp.gate"] == (40, 48)
    assert model.tokens.embedding_dim == 36
    torch.testing.assert_close(model(tokens), before)


def test_kind_and_name_select_what_matches_both(tokens: Tensor) -> None:
    model = gpt()
    outgrow.widen(model, tokens, "blocks.1.*", kind="mlp", to=48)
    assert [block.mlp.up.out_features for block in model.blocks] == [40, 48]


def test_an_exact_name_must_be_able_to_grow(tokens: Tensor) -> None:
    with pytest.raises(outgrow.GrowthError, match=r"head: it is an output of the model\n +instead: write kind='vocab'"):
        outgrow.widen(gpt(), tokens, "head", by=2, method="netmorph")


def test_a_kind_that_is_missing_is_refused_with_the_kinds_there_are(tokens: Tensor) -> None:
    with pytest.raises(SelectionError) as refusal:
        outgrow.grow(gpt(), tokens, outgrow.Widen(kind="experts", factor=2))
    lines = str(refusal.value).splitlines()
    assert lines[0].startswith("no volume is of kind 'experts': select by name instead")
    assert "  - kind='mlp': 2 volumes, e.g. blocks.0.mlp.gate" in lines
    assert "  - kind='vocab': 2 volumes, e.g. tokens#2" in lines
    assert [line.split(":")[0].strip(" -") for line in lines[1:]] == [
        f"kind={kind!r}" for kind in ("mlp", "heads", "head_dim", "width", "vocab")
    ]


def test_a_model_without_kinds_says_so() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sum(-1)

    with pytest.raises(SelectionError, match=r"no volume of this model has a kind\n +instead: select volumes by name"):
        outgrow.widen(Plain(), torch.randn(2, 3), kind="mlp", by=2)


def test_a_name_without_volumes_of_the_kind_is_refused(tokens: Tensor) -> None:
    with pytest.raises(SelectionError, match=r"no volume of kind 'mlp' matches 'tokens'\n.*blocks.0.mlp.gate"):
        outgrow.widen(gpt(), tokens, "tokens", kind="mlp", by=2)


def test_volumes_of_a_kind_that_can_not_grow_are_refused_with_the_reason(tokens: Tensor) -> None:
    model = nn.Sequential(gpt(), nn.Softmax(-1))
    with pytest.raises(outgrow.GrowthError, match=r"head: new entries \(mean\): a softmax runs over its units"):
        outgrow.widen(model, tokens, kind="vocab", by=2)


@pytest.mark.parametrize("kind", ["MLP", "hidden", 3])
def test_unknown_kinds_are_refused(kind: Any) -> None:
    with pytest.raises(SelectionError, match="write one of 'mlp', 'heads', 'head_dim', 'width'"):
        outgrow.Widen(kind=kind, factor=2)


def test_a_fold_is_refused() -> None:
    with pytest.raises(SelectionError, match="leave kind= out"):
        outgrow.Widen(kind="width", factor=2, residual="fold")


def test_a_schedule_file_holds_the_kind(tokens: Tensor, tmp_path: Path) -> None:
    schedule = outgrow.Schedule([outgrow.At(step=1, grow=[outgrow.Widen(kind="mlp", factor=1.5)])])
    schedule.to_file(tmp_path / "schedule.toml")
    assert 'kind = "mlp"' in (tmp_path / "schedule.toml").read_text()
    again = outgrow.Schedule.from_file(tmp_path / "schedule.toml")
    assert again == schedule
    assert str(again) == "step 1: Widen mlp '*' × 1.5"
    model = gpt()
    run = outgrow.Run(model, tokens, torch.optim.SGD(model.parameters(), lr=0.1), again, quiet=True)
    run.step(torch.tensor(1.0))
    assert model.blocks[1].mlp.up.out_features == 60


def test_a_plan_by_kind_changes_nothing(tokens: Tensor) -> None:
    model = gpt()
    plan = outgrow.plan(model, tokens, outgrow.Widen(kind="mlp", to=44))
    assert "40 → 44" in str(plan)
    assert model.blocks[0].mlp.up.out_features == home.HIDDEN


def test_the_report_says_what_a_unit_of_heads_is() -> None:
    family = BY_NAME["llama"]
    growth = outgrow.widen(family.build(), family.example(), kind="heads", by=4)
    name = "model.layers.0.self_attn.q_proj"
    note = f"one unit of {name} (and 1 more) is 2 query heads with the key and value head that they share"
    assert note in str(growth).splitlines()
    assert "one unit of" not in str(outgrow.widen(family.build(), family.example(), kind="mlp", by=2))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_kinds_of_a_library_model_grow_exactly(name: str) -> None:
    family = BY_NAME[name]
    model, example = family.build().double(), family.example()
    before = model(**example).logits
    outgrow.grow(model, example, outgrow.Widen(kind="mlp", factor=1.5), outgrow.Widen(kind="heads", factor=2))
    torch.testing.assert_close(model(**example).logits, before, rtol=1e-5, atol=1e-5)  # some norms compute in float32
