"""Schedules of networks that grow from nothing: every rate against a loop that counts FLOPs, and training that goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from experiments.setting import protocol
from experiments.setting.arms import Arm
from experiments.setting.flops import step_flops
from experiments.setting.models import Net
from experiments.setting.protocol import Chosen, from_nothing
from experiments.setting.schedules import SCHEDULES
from experiments.setting.segments import all_segments
from experiments.training.store import Store
from experiments.training.trainee import rates_of
from tests.helpers.experiment_runs import some_data, training

PEAK, PER_EPOCH = 0.01, 40
NETS = {"widen": (Net(r=1 / 8), Net(r=1 / 4)), "deepen": (Net(r=1 / 4, blocks=2), Net(r=1 / 4))}


def half_wave(share: float) -> float:
    """1 at the end of the warm-up, which takes a twentieth; 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * (share - 1 / 20) / (19 / 20)))


def walked(arm: Arm) -> list[list[float]]:
    """The rates of every stage, in pieces of seven steps as an interrupted run would take them."""
    found = []
    for end, stage in enumerate(arm.stages, 1):
        steps = round(stage.epochs * PER_EPOCH)
        pieces = (rates_of(arm.stages[:end], done, min(7, steps - done), PER_EPOCH) for done in range(0, steps, 7))
        found.append(list(itertools.chain.from_iterable(pieces)))
    return found


@pytest.mark.parametrize("what", NETS)
def test_a_cosine_over_flops_follows_the_flops_that_are_spent(what: str) -> None:
    arm = SCHEDULES["flops"](from_nothing("A", what, "r2r", 2, Chosen(PEAK, 0.1)))
    costs = [step_flops(net.build(0))[0] for net in NETS[what]]
    whole, spent = 2 * PER_EPOCH * costs[1], 0.0
    small, large = walked(arm)
    for rate, cost in [(rate, costs[0]) for rate in small] + [(rate, costs[1]) for rate in large]:
        share = spent / whole
        expected = min(1.0, (spent + cost) / (whole / 20)) if share < 1 / 20 else half_wave(share)
        assert rate == pytest.approx(PEAK * expected, abs=1e-9)
        spent += cost
    assert spent == pytest.approx(whole, rel=0.01)
    assert large[0] == pytest.approx(PEAK * half_wave(1 / 4), rel=0.02)  # over steps it is at half of the peak, or at 0.74
    assert large[-1] < 0.01 * PEAK


@pytest.mark.parametrize("what", NETS)
def test_a_rate_rises_again_to_the_cosine_or_to_the_peak(what: str) -> None:
    plain = from_nothing("A", what, "r2r", 8, Chosen(PEAK, 0.1))
    small, large = walked(plain)
    rise = round(len(large) / 20)
    assert rise == 12
    first, again = walked(SCHEDULES["rewarm"](plain))
    assert first == small
    for step, (rate, before) in enumerate(zip(again, large, strict=True)):
        assert rate == pytest.approx(before * min(1.0, (step + 1) / 12))
    first, again = walked(SCHEDULES["repeak"](plain))
    assert first == small
    for step, rate in enumerate(again):
        expected = (step + 1) / 12 if step < 12 else half_wave(step / len(again))
        assert rate == pytest.approx(PEAK * expected)
    assert max(again) == PEAK > max(large)


def test_a_stage_without_a_schedule_keeps_the_rates_it_had() -> None:
    """The cosine over steps, written down once more."""
    arm = from_nothing("A", "widen", "r2r", 2, Chosen(PEAK, 0.1))
    rates = [rate for stage in walked(arm) for rate in stage]
    length = round(arm.stages[0].span * PER_EPOCH)
    warm = length // 20
    for step, rate in enumerate(rates):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warm) / (length - warm)))
        assert rate == PEAK * ((step + 1) / warm) if step < warm else rate == pytest.approx(PEAK * cosine, rel=1e-12)


def tiny(schedule: str = "") -> Arm:
    """Seven epochs of five steps, from a network of four and eight channels to one of twice as many."""
    plain = from_nothing("A", "widen", "r2r", 8, Chosen(PEAK, 0.1))
    lengths = [replace(stage, epochs=epochs, span=7) for stage, epochs in zip(plain.stages, (4, 3), strict=True)]
    arm = replace(plain, net=Net(r=1 / 16, blocks=2), stages=tuple(lengths))
    return SCHEDULES[schedule](arm) if schedule else arm


def test_training_uses_these_rates(tmp_path: Path) -> None:
    """Of every step that the optimizer makes."""
    used: list[float] = []
    watch = register_optimizer_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    try:
        assert training([tiny("flops")], tmp_path, some_data(40)).run()
    finally:
        watch.remove()
    costs = [step_flops(Net(r=r, blocks=2).build(0))[0] for r in (1 / 16, 1 / 8)]
    steps = [costs[0]] * 20 + [costs[1]] * 15
    large = protocol.cost(protocol.BIG)
    warm = max(1, sum(steps) / large // 20)  # in steps of the large network; this run is shorter than twenty of them
    for number, (rate, spent) in enumerate(zip(used, itertools.accumulate(steps, initial=0.0), strict=False)):
        spent /= large
        rest = (spent - warm) / max(1, sum(steps) / large - warm)
        expected = (spent + steps[number] / large) / warm if spent < warm else 0.5 * (1 + math.cos(math.pi * rest))
        assert rate == pytest.approx(PEAK * min(1.0, expected), rel=1e-5)
    assert len(used) == 35


def test_schedules_share_the_small_network() -> None:
    arms = [tiny(), *map(tiny, SCHEDULES)]
    segments = all_segments(arms, [0])
    assert len(segments) == 1 + 3 + 2  # rewarm and repeak begin as the plain one does, a cosine over FLOPs does not
    assert len({segment.key for segment in segments}) == 6


def ticks() -> Iterator[int]:
    return itertools.count(1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_interrupted_runs_go_on_as_if_nothing_had_happened(schedule: str, tmp_path: Path) -> None:
    arm, data = replace(tiny(schedule), stages=tuple(replace(one, looks=1) for one in tiny(schedule).stages)), some_data(40)
    assert training([arm], tmp_path / "whole", data).run()
    attempts, done = 0, False
    while not done:
        attempts += 1
        part = training([arm], tmp_path / "parts", data, until=3.5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("experiments.training.train_segments.time.monotonic", ticks().__next__)
            done = part.run()
    assert attempts > 3
    for segment in all_segments([arm], [0]):
        whole, parts = Store(tmp_path / "whole").state(segment), Store(tmp_path / "parts").state(segment)
        assert whole is not None
        assert parts is not None
        assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
        assert whole["curve"]["train_loss"] == parts["curve"]["train_loss"]
