"""A model and parts of it, grown separately in any order: saved, loaded, and assigned to cohorts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.history.cohorts import cohorts
from outgrow.history.growths_on_model import history
from outgrow.model.journal import Journal
from outgrow.saving.growths_in_state_dict import growth_entries, unpack
from tests.helpers.small_runs import Block, mlp
from tests.helpers.small_runs import X as X64

INNER, OUTER = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(-1, 1, 12).view(4, 3)


class Part(nn.Module):
    """A block with a buffer that grows and is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.relu(self.a(x)) * self.gain)
        return result


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = Part()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Skip(), Skip())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), Part(), nn.Linear(4, 2))


def skips() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), Skip(), Skip(), nn.Linear(4, 2))


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), Stack(), nn.Linear(4, 2))


def part(number: int, where: str, by: int = 2) -> Callable[[Any], Any]:
    return lambda model: outgrow.widen(model[number], INNER, where, by=by)


def whole(where: str, by: int = 2) -> Callable[[Any], Any]:
    return lambda model: outgrow.widen(model, OUTER, where, by=by)


def deeper(after: str) -> Callable[[Any], Any]:
    return lambda model: outgrow.deepen(model, OUTER, after)


Stories = dict[str, tuple[Callable[[], nn.Sequential], list[Callable[[Any], Any]]]]
STORIES: Stories = {
    "a part, then the whole wraps a layer in it": (plain, [part(1, "a"), deeper("1.a")]),
    "the whole wraps a layer, then the part grows it": (plain, [deeper("1.a"), part(1, "a.0")]),
    "by turns": (plain, [part(1, "a"), whole("1.a"), deeper("1.a"), part(1, "a.0"), whole("1.a.0", 4)]),
    "a part that then has another number": (skips, [part(2, "f.a"), deeper("1")]),
    "a part that has another number, and grows with the whole": (skips, [part(2, "f.a"), deeper("1"), whole("3.f.a")]),
    "a block in a part that then has another number": (stack, [part(1, "blocks.1.f.a"), deeper("1.blocks.0")]),
    "a new block in a part": (stack, [deeper("1.blocks.0"), part(1, "blocks.1.f.a")]),
    "a part in a part": (
        stack,
        [part(1, "blocks.0.f.a"), lambda m: outgrow.widen(m[1].blocks[0], INNER, "f.a", by=2), deeper("0")],
    ),
}


def grown(story: str) -> tuple[Any, list[int]]:
    """The model, and the number of entries that each growth added."""
    build, growths = STORIES[story]
    torch.manual_seed(0)
    model, sizes = build(), []
    for growth in growths:
        before = sum(p.numel() for p in model.parameters())
        growth(model)
        sizes.append(sum(p.numel() for p in model.parameters()) - before)
    return model, sizes


@pytest.mark.parametrize("story", STORIES)
def test_cohorts_are_in_the_order_in_which_they_came(story: str) -> None:
    model, sizes = grown(story)
    assert list(cohorts(model).entries().values())[1:] == sizes


@pytest.mark.parametrize("story", STORIES)
def test_saved_and_loaded_into_a_fresh_model(story: str, path: Path) -> None:
    model, _ = grown(story)
    outgrow.save(model, path)
    again = outgrow.load(STORIES[story][0](), path)
    assert torch.equal(again(OUTER), model(OUTER))
    assert [history(one) for one in again.modules()] == [history(one) for one in model.modules()]
    assert cohorts(again).entries() == cohorts(model).entries()
    again = outgrow.load(again, path)  # all growths are done
    assert torch.equal(again(OUTER), model(OUTER))


@pytest.mark.parametrize("story", STORIES)
def test_a_model_that_has_been_through_the_first_growth(story: str, path: Path) -> None:
    model, _ = grown(story)
    outgrow.save(model, path)
    build, growths = STORIES[story]
    torch.manual_seed(0)
    early = build()
    growths[0](early)
    assert torch.equal(outgrow.load(early, path)(OUTER), model(OUTER))


@pytest.mark.parametrize("story", STORIES)
def test_resume_checkpoints(story: str) -> None:
    model, _ = grown(story)
    state = {**model.state_dict(), **growth_entries(model)}
    again = STORIES[story][0]()
    assert unpack(again, state, Journal())
    again.load_state_dict(state)
    assert torch.equal(again(OUTER), model(OUTER))


def test_a_run_goes_on_after_a_part_of_it_grew_alone(tmp_path: Path) -> None:
    """A run is saved and resumed with growths of a part before and after a growth of the run."""

    def make() -> tuple[Any, Any, outgrow.Run]:
        torch.manual_seed(0)
        model = stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        events = [
            outgrow.At(step=2, grow=[outgrow.Deepen("1.blocks.0")], new_lr=1.5),
            outgrow.At(step=9, grow=[outgrow.Widen("0", by=2)]),
        ]
        return model, optimizer, outgrow.Run(model, OUTER, optimizer, events, quiet=True)

    def go_on(model: Any, optimizer: Any, run: outgrow.Run, until: int) -> None:
        while run.steps < until:
            optimizer.zero_grad()
            model(OUTER).square().mean().backward()
            optimizer.step()
            run.step()
            if run.steps in (1, 3):
                outgrow.widen(model[1], INNER, "blocks.1.f.a", by=2, optimizer=optimizer)

    path, ours, again = tmp_path / "run.pt", make(), make()
    go_on(*ours, 5)
    ours[2].save(path)
    again[2].load(path)
    for one in (ours, again):
        go_on(*one, 12)
    assert torch.equal(again[0](OUTER), ours[0](OUTER))
    assert cohorts(ours[0]).count == 4


def test_buffers_outside_the_state_dict_of_a_block_that_is_a_copy(path: Path) -> None:
    """No plan edits the new block's buffers: they were copied after they had grown."""
    model = skips()
    whole("2.f.a")(model)
    deeper("1")(model)
    outgrow.save(model, path)
    again: Any = outgrow.load(skips(), path)
    assert torch.equal(again[2].f.gain, model[2].f.gain)
    assert len(model[2].f.gain) == 8


def test_settings_are_made_by_the_names_of_now(path: Path) -> None:
    """Loading into a model that is built at its final size: the grown part has another number since."""
    model = mlp()
    outgrow.deepen(model, X64, "blocks.0")
    outgrow.widen(model, X64, "blocks.2.up", to=12)
    outgrow.deepen(model, X64, "blocks.0")
    outgrow.save(model, path)
    big = mlp()
    blocks: list[Any] = [Block() for _ in range(4)]
    blocks[3].up, blocks[3].down = nn.Linear(6, 12), nn.Linear(12, 6)
    big.blocks = nn.Sequential(*blocks).double()
    outgrow.load(big, path)
    assert [block.up.out_features for block in big.blocks] == [8, 8, 8, 12] == [len(b.up.weight) for b in big.blocks]
    assert torch.equal(big(X64), model(X64))


def test_a_model_that_was_changed_by_hand_is_not_saved(path: Path) -> None:
    model, _ = grown("by turns")
    model[1].a = nn.Linear(4, 12)
    with pytest.raises(outgrow.GrowthError, match="changed by hand"):
        outgrow.save(model, path)
    assert not path.exists()


def test_a_buffer_outside_the_state_dict_is_saved_for_a_new_block_that_was_made_zero(path: Path) -> None:
    """Pairs that cancel need equal gains: those of the new block differ from the constructor's."""

    def stacks() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), Stack(), Stack(), nn.Linear(4, 2))

    torch.manual_seed(0)
    model = stacks()
    deeper("1")(model)
    assert not torch.equal(model[2].blocks[0].f.gain, model[1].blocks[0].f.gain)
    outgrow.save(model, path)
    assert torch.equal(outgrow.load(stacks(), path)(OUTER), model(OUTER))
