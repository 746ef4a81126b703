"""Ctrl-C at any line near the end of a growth: the model has grown and the run has recorded it, or neither."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.history.growths_on_model import history
from outgrow.process.signals import DeferredSignals

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
SOURCES = str(Path(outgrow.__file__).parent)
OFTEN = ("run.py", "grow.py", "signals.py")  # every line of these, and some lines of others


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """Python's own handler for Ctrl-C, which is missing in a process that was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Scene:
    """A run at whose second step the model grows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        events = [outgrow.At(step=2, grow=[outgrow.Widen("0", to=12)], lr=0.5, new_lr=2.0)]
        self.run = outgrow.Run(self.model, X, self.optimizer, events, check=False, quiet=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(X).square().mean().backward()
        self.optimizer.step()
        self.run.step()

    def is_consistent(self) -> bool:
        """Check that model, optimizer and run agree on the growth; return whether it has happened."""
        size = tuple(self.model[0].weight.shape)
        signs = {
            "weights": size == (12, 4),
            "attribute": self.model[0].out_features == 12,
            "momentum": tuple(self.optimizer.state[self.model[0].weight]["momentum_buffer"].shape) == (12, 4),
            "rate": self.optimizer.param_groups[0]["lr"] == 0.05,
            "history": len(history(self.model)) == 1,
            "records": len(self.run.records) == 1,
            "schedule": not self.run.ahead,
            "steps": self.run.steps == 2,
            "cohorts": self.run.pace.factors == {0: 1.0, 1: 2.0},
        }
        assert len(set(signs.values())) == 1, signs
        return signs["weights"]

    def goes_on(self) -> None:
        """Save, resume and continue: one growth in total."""
        state = self.run.state_dict()
        other = Scene()
        other.run.load_state_dict(state)
        for scene in (other, self):
            while scene.run.steps < 3:
                scene.step()
            assert scene.model[0].out_features == 12
            assert len(scene.run.records) == len(history(scene.model)) == 1


@contextmanager
def traced(line: Callable[[FrameType], None], begin: str) -> Iterator[None]:
    """Call a function at each line of outgrow's code, from the first call of the function `begin` on."""
    begun = False

    def local(frame: FrameType, event: str, given: Any) -> Any:
        if event == "line" and begun:
            line(frame)
        return local

    def enter(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal begun
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        begun |= frame.f_code.co_name == begin
        return local

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def lines(begin: str) -> list[str]:
    """The lines that a growth runs, by file."""
    scene, seen = Scene(), []
    scene.step()
    with traced(lambda frame: seen.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"), begin):
        scene.step()
    return seen


def interrupted_at(number: int, begin: str) -> tuple[Scene, bool]:
    scene, passed = Scene(), 0
    scene.step()

    def line(frame: FrameType) -> None:
        nonlocal passed
        passed += 1
        if passed == number:
            signal.raise_signal(signal.SIGINT)

    try:
        with traced(line, begin):
            scene.step()
    except KeyboardInterrupt:
        return scene, True
    return scene, False


def check_lines(begin: str, numbers: list[int]) -> None:
    grown = []
    for number in numbers:
        scene, interrupted = interrupted_at(number, begin)
        assert interrupted or number > numbers[-1] - 10  # the number of lines varies a little
        grown.append(scene.is_consistent())
        if len(grown) == 1 or grown[-1] != grown[-2] or number % 20 == 0:
            scene.goes_on()
    assert grown == sorted(grown)  # from some line on, all have grown
    assert grown[-1]


def test_an_interrupt_near_the_end_of_a_growth() -> None:
    seen, known = lines("conclude"), set[str]()
    numbers = []
    for number, line in enumerate(seen, 1):
        if line not in known and (line.startswith(OFTEN) or number % 50 == 0):
            numbers.append(number)
        known.add(line)
    check_lines("conclude", numbers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("begin", ["conclude", "apply_plan"])
def test_an_interrupt_at_every_line(begin: str) -> None:
    check_lines(begin, list(range(1, len(lines(begin)) + 1)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_with_a_handler_are_deferred_and_delivered_in_order(number: signal.Signals) -> None:
    seen: list[Any] = []
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        for one in before:
            signal.signal(one, lambda given, frame: seen.append(signal.Signals(given)))
        with DeferredSignals() as outer:
            outer.begin()
            with DeferredSignals() as inner:
                inner.begin()
                inner.begin()
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(number)
                assert not seen
            assert not seen
        assert seen == [signal.SIGTERM, number]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_handler_that_raises_does_not_prevent_others_from_being_restored() -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit):
            _raise_twice(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is leave
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def _raise_twice(number: signal.Signals) -> None:
    with DeferredSignals() as deferral:
        deferral.begin()
        signal.raise_signal(number)
        signal.raise_signal(number)


def test_handlers_run_before_the_context_is_left() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(frame.f_code.co_filename))
    try:
        deferral = DeferredSignals()
        deferral.begin()
        signal.raise_signal(signal.SIGINT)
        deferral.__exit__()
        assert [Path(name).name for name in seen] == ["signals.py"]  # not at some later instruction
    finally:
        signal.signal(signal.SIGINT, before)


def test_nothing_is_deferred_in_other_threads() -> None:
    handler, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with DeferredSignals() as deferral:
            deferral.begin()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_log_that_fails_leaves_a_run_that_has_recorded_its_growth() -> None:
    scene = Scene()

    def fail(record: Any) -> None:
        raise OSError("the disk is full")

    scene.run.log.append(fail)
    scene.step()
    with pytest.raises(UserWarning, match="disk"):  # an error in these tests
        scene.step()
    assert scene.is_consistent()
