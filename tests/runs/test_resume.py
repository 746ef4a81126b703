"""A run that is stopped or killed, and resumed with a newly built small model, equals an uninterrupted run bit for bit."""

from __future__ import annotations

import importlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outgrow
from outgrow.saving import atomic_write as atomic
from tests.helpers.training_run import EVERY, STEPS, Trial, assert_equal, without_times

PLACES = 5  # in the code, at which runs are killed


@pytest.mark.parametrize(
    ("optimizer", "stride"),
    [
        ("adamw", 4),
        ("sgd", 12),
        ("fused", 12),
        pytest.param("sgd", 4, marks=pytest.mark.exhaustive),
        pytest.param("fused", 4, marks=pytest.mark.exhaustive),
    ],
)
def test_every_moment_can_be_resumed_from(optimizer: str, stride: int, tmp_path: Path) -> None:
    whole = Trial(optimizer).go()
    assert len(whole.run.records) == 3
    path = tmp_path / "run.pt"
    part = Trial(optimizer)
    for until in range(1, STEPS, stride):
        part.go(until).run.save(path, extra={"until": until})
        again = Trial(optimizer)
        torch.manual_seed(77)  # the random state of the new process must not matter
        assert again.run.load(path) == {"until": until}
        assert_equal(without_times(again.state()), without_times(part.state()))
        part = again
    assert_equal(without_times(part.go().state()), without_times(whole.state()))
    assert_equal(list(part.average.eval()(part.data)), list(whole.average.eval()(whole.data)))


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    trial = Trial().go(12)
    trial.run.save(path)
    good = path.read_bytes()
    trial.go(13)

    def fail(*args: object) -> None:
        raise OSError("no space left on device")

    for target, name in ((torch, "save"), (os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, fail)
            with pytest.raises(outgrow.GrowthError, match="no space left"):
                trial.run.save(path)
        assert path.read_bytes() == good
        assert os.listdir(tmp_path) == ["run.pt"]


def child(work: Callable[[], None]) -> int:
    """Run something in a forked process, which starts quickly enough for a hundred of them."""
    process = os.fork()
    if not process:
        try:
            work()
        finally:
            os._exit(0)
    return process


def train(folder: Path, armed: Callable[[], None] | None = None) -> None:
    """A user's script: continue from the file if there is one, and train to the end."""
    trial = Trial()
    if (folder / "run.pt").exists():
        trial.run.load(folder / "run.pt")
    if armed is not None:
        armed()
    trial.go(path=folder / "run.pt")
    torch.save(trial.state(), folder / "draft")
    os.replace(folder / "draft", folder / "end.pt")


def dying(number: int, dice: random.Random) -> Callable[[], None]:
    """Die at a chosen moment: in the middle of a save (written, not synced; synced, not renamed), or of a growth."""
    growing = importlib.import_module("outgrow.engine.carry_out")
    saving = [(torch, "save"), (atomic, "_sync"), (os, "replace")]
    places = [*saving, (growing, "apply_plan"), (growing, "grow_optimizers")]
    target, name = places[number % len(places)]
    original, left = getattr(target, name), [dice.randrange(STEPS // EVERY if number % len(places) < len(saving) else 3)]

    def counted(*args: Any, **options: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return original(*args, **options)

    return lambda: setattr(target, name, counted)


def resumed_after(folder: Path, kill: Callable[[Path], None]) -> bool:
    """Start a run, kill it, and start it again until it ends; returns whether it was killed before its end."""
    kill(folder)
    early = not (folder / "end.pt").exists()
    os.waitpid(child(lambda: train(folder)), 0)
    return early


def killed_after(seconds: float) -> Callable[[Path], None]:
    def kill(folder: Path) -> None:
        process = child(lambda: train(folder))
        time.sleep(seconds)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    return kill


def killed_at(number: int, dice: random.Random) -> Callable[[Path], None]:
    armed = dying(number, dice)
    return lambda folder: os.waitpid(child(lambda: train(folder, armed)), 0) and None


def check(places: int, times: int, tmp_path: Path) -> None:
    """Kill runs at chosen places in the code, and at random times."""
    started = time.perf_counter()
    (tmp_path / "whole").mkdir()
    os.waitpid(child(lambda: train(tmp_path / "whole")), 0)
    seconds = time.perf_counter() - started
    truth = without_times(torch.load(tmp_path / "whole" / "end.pt", weights_only=True))
    dice, early = random.Random(0), 0
    kills = [killed_at(number, dice) for number in range(places)]
    kills += [killed_after(dice.uniform(0.0, seconds)) for _ in range(times)]
    for point, kill in enumerate(kills):
        folder = tmp_path / str(point)
        folder.mkdir()
        early += resumed_after(folder, kill)
        assert_equal(without_times(torch.load(folder / "end.pt", weights_only=True)), truth, f"point {point}")
        assert set(os.listdir(folder)) == {"run.pt", "end.pt"}, "a draft was left behind"
    assert early >= len(kills) // 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check(PLACES, 1, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")
def test_a_run_killed_at_many_moments_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check(10 * PLACES, 50, tmp_path)
