"""Bad input to a run: a clear error before training starts, and everything as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import outgrow
from outgrow.errors import GrowthError, OptimizerError, ScheduleError, VerifyError
from outgrow.verify import outputs as verify
from tests.helpers.run_scenes import Scene, refused
from tests.helpers.small_runs import DEEPEN, WIDEN, at, mlp, started, train
from tests.helpers.training_run import assert_equal

GOOD, OTHER = [at(3)], mlp(1)
CASES: dict[str, tuple[Callable[[Scene], Any], type[Exception], str]] = {
    "no such layer": (
        lambda s: s.run([at(3, outgrow.Widen("blocks.7.up", by=2))]),
        ScheduleError,
        r"event 1, at step 3.*blocks.7.up",
    ),
    "no such layer at stage three": (
        lambda s: s.run([at(3), at(5, DEEPEN), at(7, outgrow.Widen("blocks.3.up", by=2))]),
        ScheduleError,
        r"event 3, at step 7.*blocks.3.up",
    ),
    "no such layer to put blocks behind": (lambda s: s.run([at(3, outgrow.Deepen("blocks.9"))]), ScheduleError, "blocks.9"),
    "to a smaller size": (lambda s: s.run([at(3, outgrow.Widen("blocks.0.up", to=4))]), ScheduleError, "8"),
    "to a size that is smaller by then": (
        lambda s: s.run([at(3), at(5, outgrow.Widen("blocks.0.up", to=10))]),
        ScheduleError,
        "event 2, at step 5",
    ),
    "a factor that shrinks": (lambda s: s.run([at(3, outgrow.Widen("*", factor=0.5))]), GrowthError, "factor"),
    "by less than nothing": (lambda s: s.run([at(3, outgrow.Widen("blocks.0.up", by=-2))]), GrowthError, "by"),
    "a smaller kernel": (lambda s: s.run([at(3, outgrow.Kernel("stem", 1))]), GrowthError, "stem"),
    "step 0": (lambda s: s.run([at(0)]), ScheduleError, "step=0: write a number of steps, an integer above 0"),
    "epoch -1": (lambda s: s.run([outgrow.At(epoch=-1, grow=[WIDEN])]), ScheduleError, "epoch=-1"),
    "neither step nor epoch": (lambda s: s.run([outgrow.At(grow=[WIDEN])]), ScheduleError, "exactly one of step=, epoch="),
    "events that are not in order": (lambda s: s.run([at(5), at(3, DEEPEN)]), ScheduleError, "not in order of time"),
    "no schedule": (lambda s: s.run({"step": 3}), ScheduleError, "a schedule is a list of"),
    "no events": (lambda s: s.run([WIDEN]), ScheduleError, "is not an event"),
    "a number for a schedule": (lambda s: s.run(3), ScheduleError, "a schedule is a list of"),
    "a file that is not there": (lambda s: s.run("nowhere.toml"), ScheduleError, "nowhere.toml"),
    "an optimizer of another model": (
        lambda s: s.run(GOOD, optimizer=AdamW(OTHER.parameters()), scheduler=None),
        OptimizerError,
        "belongs to another model",
    ),
    "no optimizer": (lambda s: s.run(GOOD, optimizer=[], scheduler=None), OptimizerError, "needs an optimizer"),
    "what is no optimizer": (lambda s: s.run(GOOD, optimizer=3), OptimizerError, "int is no optimizer"),
    "an optimizer that follows no growth": (
        lambda s: s.run(GOOD, optimizer=torch.optim.LBFGS(s.model.parameters()), scheduler=None),
        OptimizerError,
        "LBFGS",
    ),
    "updates that can't be scaled": (
        lambda s: s.run([at(3, new_lr=2.0)], optimizer=[s.optimizer, torch.optim.LBFGS(s.model.head.parameters())]),
        OptimizerError,
        "leave new_lr= and train= out",
    ),
    "an example of another shape": (lambda s: s.run(GOOD, example=torch.zeros(2, 5).double()), GrowthError, "example"),
    "an example of another type": (lambda s: s.run(GOOD, example="x"), GrowthError, "example"),
    "a scheduler of another optimizer": (
        lambda s: s.run(GOOD, optimizer=SGD(s.model.parameters(), lr=0.1)),
        OptimizerError,
        "CosineAnnealingLR sets the rates of an optimizer outside the run, AdamW",
    ),
    "a scheduler of another optimizer, and a factor": (
        lambda s: s.run([at(3, lr=0.5)], optimizer=SGD(s.model.parameters(), lr=0.1)),
        OptimizerError,
        "rates of an optimizer outside the run",
    ),
    "not a scheduler": (lambda s: s.run(GOOD, scheduler=0.1), GrowthError, "scheduler 0 is of type float"),
    "an average of another model": (lambda s: s.run(GOOD, average=copy.deepcopy(s.model.blocks)), GrowthError, "another model"),
    "the model as its own average": (lambda s: s.run(GOOD, average=s.model), GrowthError, "shares tensors"),
    "what has no state": (lambda s: s.run(GOOD, also={"order": [1, 2]}), GrowthError, "order is of type list"),
    "things without names": (lambda s: s.run(GOOD, also=[torch.Generator()]), GrowthError, "also= is of type list"),
    "a seed that is none": (lambda s: s.run(GOOD, seed="x"), GrowthError, "seed='x'"),
    "log without a known ending": (lambda s: s.run(GOOD, log="log.txt"), ScheduleError, "must end in .csv or .jsonl"),
    "no model": (lambda s: s.run(GOOD, model=Scene), GrowthError, "pass a torch.nn.Module"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_training_starts(case: str) -> None:
    scene = Scene()
    make, error, reason = CASES[case]
    with refused(scene, error, "(?s)" + reason):
        make(scene)


def test_names_of_later_stages_refer_to_the_model_at_that_stage() -> None:
    """A layer that an earlier deepening inserts can be named."""
    scene = Scene()
    before = scene.state()
    run = scene.run([at(1, DEEPEN), at(2, outgrow.Widen("blocks.2.up", to=12))])
    assert_equal(scene.state(), before)
    old = scene.model.blocks[1]
    for step in (1, 2):
        train(scene.model, scene.optimizer, step)
        run.step()
    assert [block.up.out_features for block in scene.model.blocks] == [8, 8, 12]
    assert scene.model.blocks[2] is old


@pytest.mark.parametrize("moment", ["step", "epoch", "trigger"])
def test_a_growth_that_fails_leaves_everything_as_before(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call then tries again; the run equals one without a failure."""
    options: dict[str, Any] = {
        "grow": [WIDEN, DEEPEN],
        "lr": 0.2,
        "weight_decay": 0.5,
        "new_lr": 1.3,
        "warmup": 5,
        "train": "new",
    }
    trigger = outgrow.reached("accuracy", 0.5)
    event = outgrow.When(trigger, **options) if moment == "trigger" else outgrow.At(**{moment: 2}, **options)
    scene, twin = Scene(), Scene()
    run, other = scene.run([event]), twin.run([event])

    def fail(*args: Any) -> Any:
        raise VerifyError("thrown in")

    def go_on(one: outgrow.Run, turn: int) -> Any:
        return one.step(0.5) if moment == "step" else one.epoch({"accuracy": turn / 4})

    for turn in (1, 2, 3):
        for one in (scene, twin):
            train(one.model, one.optimizer, turn)
            one.scheduler.step()
        if turn == 2:
            with monkeypatch.context() as patch, refused(scene, VerifyError, "thrown in", run):
                patch.setattr(verify, "check", fail)
                go_on(run, turn)
        torch.manual_seed(turn)
        assert (go_on(run, turn) is not None) == (turn == 2)
        torch.manual_seed(turn)
        go_on(other, turn)
    assert_equal(scene.state()[:2], twin.state()[:2])
    assert [record.step for record in run.records] == [record.step for record in other.records]
    assert run.pace.state_dict() == other.pace.state_dict()


def test_of_two_growths_at_one_moment_the_second_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    run = scene.run([at(1), at(1, DEEPEN)])
    real, calls = verify.check, []

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise VerifyError("thrown in")
        return real(*args)

    monkeypatch.setattr(verify, "check", fail_once)
    with pytest.raises(VerifyError):
        run.step()
    assert (run.steps, len(run.done), scene.model.blocks[0].up.out_features, len(scene.model.blocks)) == (0, 1, 12, 2)
    assert run.step() is not None
    assert (run.steps, len(run.done), scene.model.blocks[0].up.out_features, len(scene.model.blocks)) == (1, 2, 12, 3)


def test_a_new_optimizer_that_the_run_does_not_know_is_stopped() -> None:
    """Its state does not follow the growth, and its next step raises."""
    model = mlp()
    given, real = AdamW(model.parameters(), lr=1e-2), AdamW(model.parameters(), lr=1e-2)
    run = started(model, given, [outgrow.At(epoch=1, grow=[WIDEN])])
    train(model, real, 1)
    run.epoch()  # run.step() would have raised
    with pytest.raises(outgrow.GrowthError, match="from before its parameters grew"):
        train(model, real, 2)


def test_a_schedule_file_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "schedule.toml"
    outgrow.Schedule([at(1), outgrow.When(outgrow.plateau("val_loss"), grow=[DEEPEN])]).to_file(path)
    scene = Scene()
    assert len(scene.run(path).schedule) == 2
    path.write_text("[[growth]]\nstep = 1\ngrow = [{ shrink = '*' }]\n")
    with refused(scene, ScheduleError, "growth 1, transform 1: a transform has one of"):
        scene.run(path)
