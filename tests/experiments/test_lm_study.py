"""The study of language models: what legs share, what a step costs, that growths are exact, that a study goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.lm import __main__ as command
from experiments.lm.arms import SETTINGS, Arm, Growth, Setting, arms
from experiments.lm.gpt import Size, build, size_of, training_flops
from experiments.lm.growing import grow_model, preserves
from experiments.lm.legs import all_legs, stretches
from experiments.lm.results import read
from experiments.lm.text import batch, shakespeare
from experiments.lm.training import Training

TINY = Setting(Size(4, 16, 2, 32, 8), 4, 16, 3, 4, 1e-2, (20, 30, 40, 50), "shakespeare")


def test_flops_of_a_step_are_those_that_torch_counts() -> None:
    size = Size(2, 16, 3, 40, 8)
    model = build(size, 32, 0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 32, dtype=torch.long)).sum().backward()
    assert training_flops(size, 2, 32) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_runs_of_several_lengths_share_their_beginning() -> None:
    short, long = Arm("a@20", TINY.large, 20), Arm("b@40", TINY.large, 40)
    legs = all_legs([short, long], [0])
    assert [(leg.first, leg.last) for leg in legs["a@20", 0]] == [(0, 16), (16, 20)]
    assert [(leg.first, leg.last) for leg in legs["b@40", 0]] == [(0, 16), (16, 32), (32, 40)]
    assert legs["a@20", 0][0].key == legs["b@40", 0][0].key
    assert legs["a@20", 0][1].key != legs["b@40", 0][1].key


def test_no_state_is_written_in_the_middle_of_a_fade() -> None:
    late = Arm("late@40", TINY.large, 40, ((0.75, Growth(layers=8, fade=4)),))
    assert [(leg.first, leg.last, leg.falls) for leg in stretches(late, 0)] == [(0, 30, None), (30, 40, 32)]
    again = Arm("soon@40", TINY.large, 40, ((0.5, Growth(layers=6, fade=4)), (0.55, Growth(layers=8))))
    with pytest.raises(ValueError, match="not over at step 22"):
        stretches(again, 0)


def test_cutting_a_run_into_legs_changes_nothing(tmp_path: Path) -> None:
    arm = Arm("deep@20", replace(TINY.large, layers=2), 20, ((0.4, Growth(layers=4, fade=4)),), 1e-2)
    whole, cut = stretches(arm, 0), all_legs([arm, arm.at(30)], [0])["deep@20", 0]
    one, other = (Training(TINY, shakespeare(), "cpu", tmp_path / name, log=lambda text: None) for name in "ab")
    ends = [[run.run(leg) for leg in legs][-1]["held_out"][20] for run, legs in ((one, whole), (other, cut))]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("arm", [arm for arm in arms(SETTINGS["cpu"]) if arm.growths], ids=lambda arm: arm.name)
def test_growths_that_should_preserve_the_function_do(arm: Arm) -> None:
    model = build(arm.start, 16, 0)
    example = batch(shakespeare().train, 2, 16, 0)[0]
    growth = arm.growths[0][1]
    before = model(example).detach()
    record = grow_model(model, example, growth, [torch.optim.AdamW(model.parameters())], 0)
    moved = float((model(example).detach() - before).abs().max() / before.abs().max())
    assert (moved < 1e-5) == preserves(growth) == record["exact"]
    if growth.widen:
        assert size_of(model) == replace(SETTINGS["cpu"].large, layers=arm.start.layers)


def test_a_study_that_is_given_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.SETTINGS, "cpu", TINY)
    given = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results"), "scratch@20", "depth-two@40"]
    assert command.main([*given, "--minutes", "0"]) == command.GOES_ON
    assert command.main([*given, "--seeds", "1"]) == 0
    found = read(tmp_path / "results")
    assert sorted(found) == ["depth-two@40", "scratch@20"]
    monkeypatch.setattr(Training, "train", None)  # nothing is trained again
    assert command.main(given) == 0
    grown = found["depth-two@40"]["seeds"]["0"]["legs"]
    assert [leg["size"].partition(" ")[0] for leg in grown if leg["growth"]] == ["2", "4"]
    for leg in grown:
        if leg["growth"]:
            assert leg["held_out"][str(leg["first"])] == pytest.approx(leg["growth"]["before"], abs=1e-4)
