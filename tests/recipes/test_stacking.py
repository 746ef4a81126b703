"""`outgrow.recipes.stack`: the schedule that it makes, and a run with it against growths made by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError
from outgrow.recipes.find_stack import stacks_in


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 2, others: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.others = nn.ModuleList([Block() for _ in range(others)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *self.others):
            x = block(x)
        return x


def test_the_moments_of_two_growths_are_those_of_the_pilot() -> None:
    schedule = outgrow.recipes.stack(Net(3), stages=[3, 6, 12], steps=2000)
    assert [event.at_step for event in schedule] == [800, 1400]
    assert [event.grow[0] for event in schedule] == [
        outgrow.Deepen(layers=layers, fade=200, order="interleave", stack="blocks") for layers in (6, 12)
    ]
    assert {event.state for event in schedule} == {"copy"}


@pytest.mark.parametrize(("steps", "fade"), [(20_000, 200), (2000, 200), (500, 50), (4, 1)])
def test_a_fade_is_at_most_a_tenth_of_the_run(steps: int, fade: int) -> None:
    (event,) = outgrow.recipes.stack(Net(2), stages=[2, 4], steps=steps)
    assert event.grow[0].fade == fade


def test_moments_fade_and_stack_can_be_given() -> None:
    schedule = outgrow.recipes.stack(Net(2, 2), [2, 3, 4], 100, shares=[0.2, 0.5], fade=7, stack="others")
    assert [event.at_step for event in schedule] == [20, 50]
    assert [event.grow[0] for event in schedule] == [outgrow.Deepen(layers=n, fade=7, stack="others") for n in (3, 4)]


def test_shares_of_many_growths_end_before_the_decay() -> None:
    schedule = outgrow.recipes.stack(Net(1), [1, 2, 3, 4, 5, 6], 1000)
    assert [event.at_step for event in schedule] == [140, 280, 420, 560, 700]


def test_stacks_are_found_from_modules_alone() -> None:
    assert stacks_in(Net(3, 2)) == {"blocks": 3, "others": 2}
    assert stacks_in(nn.Sequential(Block(), Block())) == {"": 2}
    nested = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(3)])
    assert stacks_in(nested) == {"": 3}
    assert outgrow.recipes.stack(nn.Sequential(Block(), Block()), [2, 4], 10).events[0].grow[0].stack is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stages": [4, 8]}, r"no stack of 4 blocks: .*blocks \(2 blocks\), others \(3 blocks\)"),
        ({"stages": [2]}, "increasing numbers of blocks"),
        ({"stages": [4, 2]}, "increasing numbers of blocks"),
        ({"stages": [2, 4], "shares": [0.2, 0.4]}, "needs as many shares"),
        ({"stages": [2, 4], "shares": [1.5]}, "between 0 and 1"),
        ({"stages": [2, 4], "shares": 0.4}, r"shares=0.4: write a list of numbers .*, e.g. shares=\[0.7\]"),
        ({"stages": [2, 4], "shares": [None]}, "write a list of numbers between 0 and 1"),
        ({"stages": [2, 4], "shares": [float("nan")]}, "share=nan: write a share of the run between 0 and 1"),
        ({"stages": [2, 4], "steps": 1}, "number of steps above 1"),
        ({"stages": [2, 4], "stack": "others"}, "others: it has 3 blocks"),
        ({"stages": [2, 4], "stack": "stem"}, "stem: it is no stack"),
    ],
)
def test_mistakes(options: dict[str, object], text: str) -> None:
    with pytest.raises(GrowthError, match=text):
        outgrow.recipes.stack(Net(2, 3), **{"steps": 100, **options})  # type: ignore[arg-type]


def test_two_stacks_of_one_size_have_to_be_told_apart() -> None:
    with pytest.raises(GrowthError, match="stack='blocks' or stack='others'"):
        outgrow.recipes.stack(Net(2, 2), stages=[2, 4], steps=100)


def test_a_run_with_the_recipe_is_the_growth_by_hand_with_copied_moments() -> None:
    """By hand: `outgrow.deepen`, then Adam's state of each block is copied to the copy behind it."""
    torch.manual_seed(0)
    one = Net(2).double()
    other = copy.deepcopy(one)
    x = torch.randn(5, 4, dtype=torch.float64)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (one, other)]
    schedule = outgrow.recipes.stack(one, stages=[2, 4], steps=10, fade=2)
    run = outgrow.Run(one, x, optimizers[0], schedule, quiet=True)
    for index in range(10):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        run.step()
        if index + 1 == 7:
            before = [{name: optimizers[1].state[p] for name, p in block.named_parameters()} for block in other.blocks]
            outgrow.deepen(other, x, layers=4, fade=2, optimizer=optimizers[1])
            for number, block in enumerate(other.blocks):
                for name, parameter in block.named_parameters():
                    optimizers[1].state[parameter] = copy.deepcopy(before[number // 2][name])
    assert len(one.blocks) == 4
    for (name, parameter), twin in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, twin), name


def test_what_is_no_model_is_refused() -> None:
    for wrong, found in (("gpt2", "of type str"), (Net, "the class Net, not an instance")):
        with pytest.raises(GrowthError, match=found):
            outgrow.recipes.stack(wrong, stages=[2, 4], steps=100)


def test_a_stack_inside_of_another_one_is_taken_if_it_is_named() -> None:
    stages = nn.Sequential(*(nn.Sequential(*(Block() for _ in range(count))) for count in (2, 4, 4)))
    with pytest.raises(GrowthError, match="only inside of another one: write stack='1' or stack='2'"):
        outgrow.recipes.stack(stages, stages=[4, 8], steps=100)
    schedule = outgrow.recipes.stack(stages, stages=[4, 8], steps=100, stack="1")
    optimizer = torch.optim.SGD(stages.parameters(), lr=1e-3)
    run = outgrow.Run(stages, torch.randn(2, 6), optimizer, schedule, quiet=True)
    for _ in range(100):
        optimizer.zero_grad()
        stages(torch.randn(2, 6)).square().mean().backward()
        optimizer.step()
        run.step()
    assert [len(stage) for stage in stages] == [2, 8, 4]


def test_a_fade_must_be_over_at_the_end() -> None:
    outgrow.recipes.stack(Net(2), stages=[2, 4], steps=100, fade=30)
    with pytest.raises(GrowthError, match="still fade in at the end; write fade=30 or less, or earlier shares="):
        outgrow.recipes.stack(Net(2), stages=[2, 4], steps=100, fade=31)


def test_a_run_that_is_too_short_for_the_fade_of_its_schedule_warns() -> None:
    model = Net(2)
    schedule = outgrow.recipes.stack(model, stages=[2, 4], steps=1000)  # fades over 100 steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outgrow.Run(model, torch.randn(2, 4), optimizer, schedule, steps=400, quiet=True)
    with pytest.warns(UserWarning, match="grows at step 14 of 20, and fade=100"):
        outgrow.Run(model, torch.randn(2, 4), optimizer, schedule, steps=20, quiet=True)
