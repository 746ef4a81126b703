"""Triggers: what each of them decides, in Python and in files, and when growths that wait for one happen.

A new trigger is one `Case`; the tests below it then check its decisions, its file form and its errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import GrowthError, ScheduleError
from outgrow.runs.triggers import TRIGGERS, Metrics, Trigger
from tests.helpers.run_scenes import Scene, refused
from tests.helpers.small_runs import DEEPEN, WIDEN

NAN = math.nan


@dataclass(frozen=True)
class Case:
    """A trigger with a history of metrics: its decision after each epoch, and its line in a timeline."""

    name: str
    trigger: Trigger
    history: Sequence[Metrics]
    decisions: Sequence[bool]
    shown: str

    def __str__(self) -> str:
        return f"{self.name}: {self.shown}"


def losses(*values: float) -> list[Metrics]:
    return [{"loss": value} for value in values]


CASES = [
    Case("plateau", outgrow.plateau("loss", 1), losses(3, 2, 2), [False, False, True], "loss has not improved for 1 epoch"),
    Case(
        "plateau",
        outgrow.plateau("loss", patience=2),
        losses(3, 3.5, 2.9, 3, 2.9, 2.8),
        [False, False, False, False, True, False],
        "loss has not improved for 2 epochs",
    ),
    Case(
        "plateau",
        outgrow.plateau("loss", patience=1, least=0.5),
        losses(3, 2.6, 2.4, 2.3),
        [False, True, False, True],
        "loss has not improved for 1 epoch",
    ),
    Case(
        "plateau",
        outgrow.plateau("loss", patience=1, mode="max"),
        losses(1, 2, 1.9),
        [False, False, True],
        "loss has not improved for 1 epoch",
    ),
    Case(
        "plateau",
        outgrow.plateau("loss", patience=1),
        losses(1, NAN, NAN, 2),
        [False, False, False, True],  # a diverged run does not grow
        "loss has not improved for 1 epoch",
    ),
    Case(
        "reached", outgrow.reached("loss", 0.9), losses(0.5, NAN, 0.9, 0.8), [False, False, True, False], "loss is at least 0.9"
    ),
    Case("reached", outgrow.reached("loss", 2, mode="min"), losses(3, 2, 1), [False, True, True], "loss is at most 2"),
]
WRONG: dict[str, tuple[Callable[[], Trigger], str]] = {
    "plateau of nothing": (lambda: outgrow.plateau(""), "write the name of a metric"),
    "patience": (lambda: outgrow.plateau("loss", patience=0), "patience=0: write a number of epochs"),
    "patience of a half": (lambda: outgrow.plateau("loss", patience=1.5), "patience=1.5"),  # type: ignore[arg-type]
    "mode": (lambda: outgrow.plateau("loss", mode="low"), "mode='low': write 'min'"),
    "least": (lambda: outgrow.plateau("loss", least=-1), "least=-1: write the least improvement"),
    "reached of nothing": (lambda: outgrow.reached("", 1), "write the name of a metric"),
    "value": (lambda: outgrow.reached("loss", NAN), "value=nan: write a number"),
    "other mode": (lambda: outgrow.reached("loss", 1, mode="low"), "mode='low': write 'max'"),
}


def test_every_trigger_has_a_case() -> None:
    assert {case.name for case in CASES} == set(TRIGGERS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decisions(case: Case) -> None:
    assert not case.trigger([])
    assert [case.trigger(case.history[:epoch]) for epoch in range(1, len(case.history) + 1)] == case.decisions
    assert str(case.trigger) == case.shown


@pytest.mark.parametrize("case", CASES, ids=str)
def test_files_hold_it_and_a_missing_metric_is_named(case: Case) -> None:
    schedule = outgrow.Schedule([outgrow.When(case.trigger, grow=[WIDEN])])
    data = schedule.to_dict()
    assert data["growth"][0]["when"]["rule"] == case.name
    assert outgrow.Schedule.from_dict(data) == schedule
    assert case.shown in str(schedule)
    with pytest.raises(ScheduleError, match=r"the metric 'loss', which was not measured \(measured: other\)"):
        case.trigger([{"other": 1.0}])


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments(wrong: str) -> None:
    make, message = WRONG[wrong]
    with pytest.raises(ScheduleError, match=message):
        make()


def test_a_missing_metric_is_an_error_in_the_first_epoch() -> None:
    scene = Scene()
    triggers = [outgrow.plateau("val_loss", patience=2), outgrow.reached("accuracy", 0.9)]
    run = scene.run([outgrow.When(triggers[0], grow=[WIDEN]), outgrow.When(triggers[1], grow=[DEEPEN])])
    for metrics in (None, {}):
        with refused(scene, ScheduleError, "val_loss has not improved for 2 epochs.*run.epoch", run):
            run.epoch(metrics)
    for metrics, missing in (({"loss": 1.0}, "val_loss|accuracy"), ({"val_loss": 1.0}, "accuracy")):
        with refused(scene, ScheduleError, f"reads the metric '({missing})', which was not measured", run):
            run.epoch(metrics)
    for value in ("low", None, torch.ones(2)):
        with refused(scene, GrowthError, "the metric 'val_loss' is not a number", run):
            run.epoch({"val_loss": value, "accuracy": 0.1})
    for metrics in (0.5, [("val_loss", 0.5)]):
        with refused(scene, ScheduleError, "metrics must be a dict", run):
            run.epoch(metrics)  # type: ignore[arg-type]
    assert run.epoch({"val_loss": torch.tensor(1.0), "accuracy": 0.1}) is None
    assert run.epochs == 1


def test_a_metric_of_nan_is_no_improvement() -> None:
    scene = Scene()
    triggers = [outgrow.plateau("val_loss", patience=2), outgrow.reached("accuracy", 0.9)]
    run = scene.run([outgrow.When(triggers[0], grow=[WIDEN]), outgrow.When(triggers[1], grow=[DEEPEN])])
    grown = [
        run.epoch({"val_loss": loss, "accuracy": math.nan}) is not None
        for loss in (1.0, math.nan, 0.5, math.nan, math.nan, 0.6)
    ]
    assert grown == [False, False, False, False, False, True]  # not while it is NaN
    assert run.epoch({"val_loss": 1.0, "accuracy": math.nan}) is None
    assert run.epoch({"val_loss": 1.0, "accuracy": 0.95}) is not None
    assert len(scene.model.blocks) == 3


def make(*events: Any) -> outgrow.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outgrow.Run(model, torch.randn(6, 4, dtype=torch.float64), optimizer, events, quiet=True)


def test_a_trigger_waits_for_the_events_before_it() -> None:
    fixed = outgrow.At(epoch=3, grow=[outgrow.Deepen(after="1")])
    run = make(fixed, outgrow.When(lambda past: True, grow=[outgrow.Widen("2.branch.0", by=4)]))
    grown = [run.epoch({"loss": 1.0}) is not None for _ in range(4)]
    assert grown == [False, False, True, False]  # both in the third epoch
    assert [record.what for record in run.records] == ["Deepen after '1' + 1", "Widen '2.branch.0' by 4"]


def test_an_event_at_a_fixed_time_must_be_possible_without_the_triggers_before_it() -> None:
    event = outgrow.When(outgrow.plateau("loss"), grow=[outgrow.Deepen(after="1")])
    with pytest.raises(ScheduleError, match=r"after all fixed times.*2\.branch\.0"):
        make(event, outgrow.At(epoch=9, grow=[outgrow.Widen("2.branch.0", by=4)]))
    run = make(event, outgrow.At(epoch=1, grow=[outgrow.Widen("0", by=4)]))
    run.epoch({"loss": 1.0})
    assert run.model[0].out_features == 12


def test_what_is_not_a_trigger_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"3 is not a trigger: write e\.g\. outgrow\.plateau"):
        outgrow.When(3, grow=[WIDEN])  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"is Python code, which a file can't hold: use one of the named triggers, plateau"):
        outgrow.Schedule([outgrow.When(lambda past: True, grow=[WIDEN])]).to_dict()
