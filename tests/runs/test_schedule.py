"""Events at shares of a run are those at explicit steps or epochs; copies of blocks can get their originals' state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import ScheduleError
from tests.helpers.small_runs import WIDEN, X, mlp, train

STACK = outgrow.Deepen(layers=4, fade=3, stack="blocks")


def at(*, grow: Any = WIDEN, **when: Any) -> outgrow.At:
    return outgrow.At(grow=[grow], **when)


def trained(schedule: Any, until: int, per_epoch: int = 5, **options: Any) -> tuple[nn.Module, Any]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = outgrow.Run(model, X, optimizer, schedule, quiet=True, **options)
    go_on(run, until, per_epoch)
    return model, run


def go_on(run: Any, until: int, per_epoch: int = 5) -> None:
    while run.steps < until:
        train(run.model, run.optimizers[0], run.steps)
        run.step()
        if run.steps % per_epoch == 0:
            run.epoch()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, a), (other_name, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("length", "explicit"),
    [
        ({"steps": 20}, [at(step=8), at(step=14, grow=STACK)]),
        ({"epochs": 4}, [at(epoch=2), at(epoch=3, grow=STACK)]),
    ],
    ids=["steps", "epochs"],
)
def test_a_run_with_shares_is_the_run_with_steps_or_epochs(length: dict[str, int], explicit: list[outgrow.At]) -> None:
    shares = [at(share=0.4), at(share=0.7, grow=STACK)]
    by_share, run = trained(shares, 20, **length)
    by_number, other = trained(explicit, 20)
    assert_same(by_share, by_number)
    assert [record.step for record in run.records] == [record.step for record in other.records]
    assert [stage.parameters for stage in run.timeline.stages] == [stage.parameters for stage in other.timeline.stages]


def test_moments_are_rounded_and_neither_start_nor_end() -> None:
    schedule = outgrow.Schedule([at(share=share) for share in (0.001, 1 / 3, 0.5, 0.999)])
    assert [event.at_step for event in schedule.over(steps=100)] == [1, 33, 50, 99]
    assert [event.at_epoch for event in schedule.over(epochs=3)] == [1, 1, 2, 2]
    assert [event.at_step for event in schedule.over(epochs=3)] == [None] * 4
    assert [event.at_step for event in schedule.over(steps=10).over(steps=100)] == [1, 33, 50, 99]


def test_without_the_length_of_the_run_a_share_is_an_error() -> None:
    with pytest.raises(ScheduleError, match=r"length of the run is not known, and At\(40 % of the run: .*steps=N\)"):
        trained([at(step=2), at(share=0.4)], 5)
    with pytest.raises(ScheduleError, match="either steps= or epochs="):
        trained([at(share=0.4)], 5, steps=10, epochs=2)
    with pytest.raises(ScheduleError, match="steps='10': write the length of the run"):
        trained([at(share=0.4)], 5, steps="10")


def test_order_is_checked_within_shares_and_between_shares_and_steps() -> None:
    with pytest.raises(ScheduleError, match=r"not in order of time \(share \[0.7, 0.4\]\)"):
        outgrow.Schedule([at(share=0.7), at(share=0.4)])
    mixed = outgrow.Schedule([at(step=50), at(share=0.4)])
    assert [event.at_step for event in mixed.over(steps=1000)] == [50, 400]
    with pytest.raises(ScheduleError, match=r"not in order of time \(step \[50, 40\]\)"):
        mixed.over(steps=100)


def test_files_and_the_timeline_need_no_length(tmp_path: Path) -> None:
    schedule = outgrow.Schedule([at(share=0.4), at(share=0.7, grow=STACK)])
    for name in ("plan.toml", "plan.json"):
        schedule.over(steps=20).to_file(tmp_path / name)
        assert outgrow.Schedule.from_file(tmp_path / name) == schedule
    assert "share = 0.4\n" in (tmp_path / "plan.toml").read_text()
    assert [stage.when for stage in outgrow.timeline(mlp(), X, schedule).stages] == [
        "start",
        "40 % of the run",
        "70 % of the run",
    ]
    _, run = trained(tmp_path / "plan.toml", 9, steps=20)
    assert [record.step for record in run.records] == [8]
    assert str(run.timeline).count("step 14 (70 % of the run)") == 1


def test_resuming_with_the_same_length_and_with_another_one(tmp_path: Path) -> None:
    shares = [at(share=0.4), at(share=0.7, grow=STACK)]
    whole, _ = trained(shares, 20, steps=20)
    _, first = trained(shares, 10, steps=20)
    first.save(tmp_path / "run.pt")

    def resumed(steps: int) -> Any:
        run = trained(shares, 0, steps=steps)[1]
        run.load(tmp_path / "run.pt")
        go_on(run, 20)
        return run

    again = resumed(20)
    assert_same(again.model, whole)
    assert [record.step for record in resumed(25).records] == [8, 18]  # the growth that was ahead: 70 % of 25, rounded
    with pytest.raises(ScheduleError, match=r"(?s)event 2 is past: .*resume with the length that the saved run had"):
        resumed(14)


@pytest.mark.parametrize("state", ["copy", "carry"])
def test_copies_of_blocks_get_the_state_of_their_originals_on_request(state: str) -> None:
    """And only the blocks that are copies: zeroed blocks differ from their originals, and learn from the beginning."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    events = [outgrow.At(step=3, grow=[STACK], state=state), outgrow.At(step=8, grow=[outgrow.Deepen("blocks.0")], state=state)]
    run = outgrow.Run(model, X, optimizer, events, quiet=True)
    go_on(run, 3)
    for new, old in ((1, 0), (3, 2)):
        for one, other in zip(model.blocks[new].parameters(), model.blocks[old].parameters(), strict=True):
            if state == "carry":
                assert one not in optimizer.state
                continue
            assert optimizer.state[one]["step"] == 3
            for key, value in optimizer.state[other].items():
                assert torch.equal(optimizer.state[one][key], value)
                assert optimizer.state[one][key] is not value
    go_on(run, 8)
    assert len(model.blocks) == 5
    assert model.blocks[1].down.weight not in optimizer.state


def test_a_growth_without_a_schedule_copies_state_too() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0)
    outgrow.grow(model, X, STACK, optimizer=optimizer, state="copy")
    copied, original = (optimizer.state[model.blocks[at].up.weight]["momentum_buffer"] for at in (1, 0))
    assert torch.equal(copied, original)
    with pytest.raises(outgrow.GrowthError, match="state='fresh': write 'carry', or 'copy'"):
        outgrow.grow(model, X, WIDEN, optimizer=optimizer, state="fresh")


def test_a_growth_that_fails_takes_copied_state_back() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = outgrow.Run(model, X, optimizer, [outgrow.At(step=2, grow=[STACK], state="copy")], quiet=True)
    go_on(run, 1)
    before = dict(optimizer.state)
    train(model, optimizer, 1)
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(outgrow.GrowthError):
        run.step()
    assert set(map(id, optimizer.state)) == set(map(id, before))
    assert len(model.blocks) == 2


@pytest.mark.parametrize(
    ("event", "length", "text"),
    [
        (at(step=30), {"steps": 20}, "step 30.* will not happen: the run ends at step 20"),
        (at(epoch=4), {"epochs": 3}, "epoch 4.* will not happen: the run ends at epoch 3"),
        (at(step=18, grow=STACK), {"steps": 20}, "grows at step 18 of 20, and fade=3"),
    ],
)
def test_what_is_behind_the_end_of_a_run_warns(event: outgrow.At, length: dict[str, int], text: str) -> None:
    with pytest.warns(UserWarning, match=text):
        trained([event], 0, **length)
    trained([event], 0, **{unit: 2 * amount for unit, amount in length.items()})  # without a warning
