"""Experiments that are stopped: the first signal waits until they can be gone on with, the second does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.__main__ import stoppable
from experiments.setting.segments import segments_of
from experiments.training.store import Store
from tests.helpers.experiment_arms import ARM
from tests.helpers.experiment_runs import some_data, training

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_where_it_can_be_gone_on_with(number: signal.Signals, tmp_path: Path) -> None:
    arm = replace(ARM, stages=(replace(ARM.stages[0], epochs=50),))
    work = training([arm], tmp_path, some_data(), until=time.monotonic() + 600)
    told = work.tell

    def tell(done: float, text: str) -> None:
        told(done, text)
        os.kill(os.getpid(), number)

    def unhandled(number: int, frame: object) -> None:
        raise AssertionError(f"signal {number} is not handled")

    work.tell = tell
    before = signal.signal(number, unhandled)
    try:
        with stoppable(work):
            assert not work.run()
        assert signal.getsignal(number) is unhandled
    finally:
        signal.signal(number, before)
    assert Store(tmp_path).steps(segments_of(arm, 0)[0]) == 2  # an epoch
    assert training([arm], tmp_path, some_data()).run()


def in_another_python(*words: str, first: Path) -> subprocess.CompletedProcess[str]:
    """Runs in the repository's root; modules in `first` come before those that are installed."""
    places = os.pathsep.join(map(str, (first, ROOT, ROOT / "src", ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_an_interrupt_before_anything_is_there(tmp_path: Path) -> None:
    """Ctrl-C while torch is being imported."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('still there')\n")
    found = in_another_python("-m", "experiments", "--list", first=tmp_path)
    assert (found.returncode, found.stdout) == (130, "")
    assert re.fullmatch(r"stopped at once; .*\n", found.stderr)


STOPPED = """
import os, runpy, signal, sys
from dataclasses import replace
from experiments.setting import data
from experiments.training import train_segments as training
from tests.helpers.experiment_runs import some_data

def steps_and_stop(*what):
    steps(*what)
    for number in range(signals):
        os.kill(os.getpid(), signal.SIGINT)

signals = int(sys.argv.pop(1))
steps, training.Training._collect = training.Training._collect, steps_and_stop
data.cifar10 = lambda folder: replace(some_data(256, 10), name="CIFAR-10")
runpy.run_module("experiments", run_name="__main__")
"""


@pytest.mark.parametrize(("signals", "code", "kept"), [pytest.param(1, 3, 1, marks=pytest.mark.exhaustive), (2, 130, 0)])
def test_the_first_interrupt_waits_and_the_second_does_not(signals: int, code: int, kept: int, tmp_path: Path) -> None:
    folders = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    found = in_another_python("-c", STOPPED, str(signals), "BI-Std", *folders, first=tmp_path)
    assert found.returncode == code
    assert "stopping after this epoch of all; once more to stop at once" in found.stdout
    assert ("the same command goes on\n" in found.stdout) == (signals == 1)
    assert len(list((tmp_path / "work").iterdir())) == kept
    assert re.fullmatch(r"stopped at once; .*\n" if signals == 2 else "", found.stderr)
