"""Names of volumes, and errors for names that match none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import outgrow

IDS = torch.arange(12).view(3, 4)


class Tokens(nn.Module):
    """A language model whose stream can grow, or can't because it is returned as well."""

    def __init__(self, returns_stream: bool, gated: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(12, 6)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.head, self.returns_stream = nn.Linear(6, 12), returns_stream

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed_tokens(ids)
        x = x + self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))
        return (self.head(x), x) if self.returns_stream else self.head(x)


@pytest.mark.parametrize("returns_stream", [False, True])
def test_names_do_not_depend_on_what_can_grow(returns_stream: bool) -> None:
    found = {volume.name: volume for volume in outgrow.volumes(Tokens(returns_stream), IDS)}
    assert found["embed_tokens"].size == 6  # the stream
    assert found["embed_tokens"].growable != returns_stream
    assert found["embed_tokens#2"].size == 12  # the words, which never grow
    assert "looked up" in found["embed_tokens#2"].reason


def test_an_error_names_the_other_volume_of_a_module() -> None:
    with pytest.raises(outgrow.GrowthError, match=r"embed_tokens has other volumes: embed_tokens$"):
        outgrow.widen(Tokens(False), IDS, "embed_tokens#2", by=2)


def test_volumes_that_were_refused_are_not_advised() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    with pytest.raises(outgrow.GrowthError) as raised:
        outgrow.widen(model, torch.randn(3, 4), "*", by=2, method="r2r")
    assert "0#2: its size is set by the model's input" in str(raised.value)
    assert "other volumes" not in str(raised.value)


@pytest.mark.parametrize("pattern", ["up_proj", "*up_proj"])
def test_a_module_that_no_volume_is_called_after_is_led_to_its_volume(pattern: str) -> None:
    with pytest.raises(outgrow.GrowthError) as raised:
        outgrow.widen(Tokens(False), IDS, pattern, by=2)
    assert "up_proj: no volume has its name: it reads embed_tokens, writes gate_proj" in str(raised.value)
    assert "write 'gate_proj'" in str(raised.value)
    outgrow.widen(Tokens(False), IDS, "gate_proj", by=2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("pattern", ["*.up", "0.up"])
def test_a_module_whose_own_volume_can_not_grow_is_led_to_the_one_that_it_writes(pattern: str) -> None:
    """The volume that is called 0.up is the model's input."""
    model, x = nn.Sequential(Gated(), Gated()), torch.randn(5, 4)
    with pytest.raises(outgrow.GrowthError, match=r"0\.up: its size is set by the model's input(.|\n)*other volumes: 0\.gate"):
        outgrow.widen(model, x, pattern, by=2)
    assert outgrow.widen(model, x, "0.gate", by=2).plan.changes[0].volume == "0.gate"


def test_names_that_are_no_module_get_those_that_come_near() -> None:
    with pytest.raises(outgrow.GrowthError, match="similar names: gate_proj"):
        outgrow.widen(Tokens(False), IDS, "gate_prj", by=2)


def test_what_lies_behind_an_operator_without_a_rule_is_said_so() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(torch.special.bessel_j0(self.one(x))))

    found = {volume.name: volume.reason for volume in outgrow.volumes(Unknown(), torch.randn(3, 6))}
    assert found["one"] == "operator aten.special_bessel_j0 has no rule (outgrow.rule('aten::special_bessel_j0') adds one)"
    assert "aten.special_bessel_j0, and units can't be followed through that operator" in found["two#2"]


def test_reads_of_padding_are_no_volume_that_grows() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 8), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(nn.functional.pad(self.one(x), (0, 4)))

    found = {volume.name: volume for volume in outgrow.volumes(Padded(), torch.randn(3, 6))}
    assert found["one"].growable
    assert "padding" in found["two#2"].reason
