"""The study of language models: what legs share, what a step costs, that growths are exact, that a study goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.lm import __main__ as command
from experiments.lm import page, tuning
from experiments.lm.arms import MAIN, SETTINGS, Arm, Growth, Setting, arms, kind_of
from experiments.lm.gpt import Size, build, size_of, training_flops
from experiments.lm.growing import grow_model, preserves
from experiments.lm.legs import all_legs, stretches
from experiments.lm.replays import Replays
from experiments.lm.results import plain, read
from experiments.lm.savings import saving_of
from experiments.lm.study import RESULTS
from experiments.lm.text import batch, shakespeare
from experiments.lm.training import Training

TINY = Setting(Size(4, 16, 2, 32, 8), 4, 16, 3, 4, 1e-2, (20, 30, 40, 50), (30, 40), (40,), "shakespeare")


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


KINDS = {(arm.start, arm.growths[0][1]): arm for arm in arms(SETTINGS["cpu"]) if arm.growths}  # arms differ in more than that


@pytest.mark.parametrize("arm", KINDS.values(), ids=lambda arm: arm.name)
def test_growths_that_should_preserve_the_function_do(arm: Arm) -> None:
    model = build(arm.start, 16, 0)
    example = batch(shakespeare().train, 2, 16, 0)[0]
    growth = arm.growths[0][1]
    before = model(example).detach()
    record = grow_model(model, example, growth, [torch.optim.AdamW(model.parameters())], 0)
    moved = float((model(example).detach() - before).abs().max() / before.abs().max())
    assert (moved < 1e-5) == preserves(growth) == record["exact"]
    if growth.widen:
        assert size_of(model) == replace(SETTINGS["cpu"].large, layers=growth.layers or arm.start.layers)


def test_a_study_that_is_given_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.SETTINGS, "cpu", TINY)
    results = tmp_path / "results" / "cpu"
    given = ["--work", str(tmp_path / "work"), "--results", str(results.parent), "scratch@[23]0", "depth-two@[34]0"]
    assert command.main([*given, "--minutes", "0"]) == command.GOES_ON
    assert "within the first leg, which begins again next time: give more --minutes" in capsys.readouterr().out
    assert command.main([*given, "--seeds", "1"]) == 0
    found = read(results)
    assert sorted(found) == ["depth-two@30", "depth-two@40", "scratch@20", "scratch@30"]
    monkeypatch.setattr(Training, "train", None)  # nothing is trained again
    assert command.main(given) == 0
    grown = found["depth-two@40"]["seeds"]["0"]["legs"]
    assert [leg["size"].partition(" ")[0] for leg in grown if leg["growth"]] == ["2", "4"]
    for leg in grown:
        if leg["growth"]:
            assert leg["held_out"][str(leg["first"])] == pytest.approx(leg["growth"]["before"], abs=1e-4)
    assert page.main(["--results", str(results.parent), "--out", str(tmp_path / "page.md")]) == 0
    written = (tmp_path / "page.md").read_text()
    (line,) = (line for line in written.splitlines() if line.startswith("| depth-two@40 |"))
    assert line.split(" | ")[2] == f"{list(grown[-1]['held_out'].values())[-1]:.3f}"
    assert "## Muon" not in written  # no such arm was run
    assert "deepened twice" in (tmp_path / "page.svg").read_text()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by torch's compiler itself
def test_compiled_blocks_learn_the_same_and_are_compiled_again_after_a_growth(tmp_path: Path) -> None:
    growth = Growth(layers=4, fade=4, state="copied")
    arm = Arm("deep@20", replace(TINY.large, layers=2), 20, ((0.4, growth),), 1e-2)
    ends = []
    for backend in (None, "aot_eager"):
        training = Training(TINY, shakespeare(), "cpu", tmp_path / str(backend), backend=backend, log=lambda text: None)
        torch._dynamo.utils.counters.clear()
        curves = [training.run(leg) for leg in all_legs([arm], [0])["deep@20", 0]]
        ends.append([curve["held_out"] for curve in curves])
    for one, other in zip(*ends, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # blocks share one; another after the growth


WIDE = Growth(widen=(("mlp", 2.0),), method="net2net", state="rewarmed")


@pytest.mark.parametrize(
    "arm",
    [
        Arm("deep@30", replace(TINY.large, layers=2), 30, ((0.4, Growth(layers=4, fade=4, state="copied")),), 1e-2),
        Arm("wide@30", replace(TINY.large, hidden=TINY.large.hidden // 2), 30, ((0.4, WIDE),), 1e-2),
        Arm("muon@30", TINY.large, 30, (), 1e-2, optimizer="muon"),
    ],
    ids=lambda arm: arm.name,
)
def test_replayed_steps_learn_the_same(arm: Arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = []
    make = Replays.__init__
    monkeypatch.setattr(Replays, "__init__", lambda self, *how: replayed.append(len(how[-1])) or make(self, *how))
    curves = curves_with_and_without_replays(arm, tmp_path, "cpu")
    for one, other in zip(*curves, strict=True):
        assert one["held_out"] == pytest.approx(other["held_out"], abs=1e-6)
        assert one["train"] == pytest.approx(other["train"], abs=1e-4)
    assert sum(replayed) == {"deep@30": 30 - 4, "wide@30": 30 - 4, "muon@30": 0}[arm.name]


def curves_with_and_without_replays(
    arm: Arm, folder: Path, device: str, backend: str | None = None
) -> list[list[dict[str, Any]]]:
    setting, text, curves = replace(TINY, fade=4), shakespeare().to(device), []
    for replays in (False, True):
        training = Training(setting, text, device, folder / str(replays), None, backend, replays, log=lambda text: None)
        curves.append([training.run(leg) for leg in all_legs([arm], [0])[arm.name, 0]])
    return curves


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", [None, "inductor"])
def test_replayed_steps_learn_the_same_on_a_gpu(backend: str | None, tmp_path: Path) -> None:
    growth = Growth(layers=4, fade=4, state="copied")
    arm = Arm("deep@30", replace(TINY.large, layers=2), 30, ((0.4, growth),), 1e-2)
    curves = curves_with_and_without_replays(arm, tmp_path, "cuda", backend)
    for one, other in zip(*curves, strict=True):
        assert list(one["held_out"].values()) == pytest.approx(list(other["held_out"].values()), abs=0.02)  # bfloat16


def test_each_kind_of_runs_gets_the_rate_and_the_decay_that_were_best_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.SETTINGS, "cpu", replace(TINY, fade=2))
    given = ["--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert tuning.main([*given, "--minutes", "0"]) == tuning.GOES_ON
    assert tuning.main(given) == 0
    losses = {}
    for content in read(tmp_path / "results" / "cpu" / "tuning").values():
        arm, legs = content["arm"], content["seeds"]["7"]["legs"]
        losses[arm["name"].partition("-")[0], arm["rate"], arm["decay"]] = legs[-1]["held_out"][str(arm["steps"])]
    assert len(losses) == 15  # three kinds, three rates and two more decays each
    found = tuning.tuned_in(tmp_path / "results" / "cpu")
    for arm in arms(TINY, found):
        if "-rate" not in arm.name:
            own = {key[1:]: loss for key, loss in losses.items() if key[0] == kind_of(arm)}
            assert own[arm.rate, arm.decay] == min(own.values())
    assert f"scratch: rate {found['scratch'].rate:g}" in capsys.readouterr().out


def test_the_main_arms_are_some_of_all_and_their_kept_results_are_complete() -> None:
    found = arms(SETTINGS["cpu"])
    (wanted,) = command.chosen(found, ["main"])
    assert {arm.name.partition("@")[0] for arm in wanted} == set(MAIN)
    kept = read(RESULTS / "cpu")
    assert {arm.name for arm in wanted} <= kept.keys() <= {arm.name for arm in found}
    for arm in (arm for arm in found if arm.name in kept):
        assert kept[arm.name]["arm"] == plain(arm)
        assert list(kept[arm.name]["seeds"]) == ["0", "1", "2"]
        grown = [leg for run in kept[arm.name]["seeds"].values() for leg in run["legs"] if leg["growth"]]
        assert len(grown) == 3 * len(arm.growths)
        for leg in grown:  # what should keep the function has kept it, on held-out text
            change = abs(leg["held_out"][str(leg["first"])] - leg["growth"]["before"])
            assert change < 1e-5 or not leg["growth"]["exact"]


def test_the_page_is_drawn_from_the_kept_results(tmp_path: Path) -> None:
    assert page.main(["--out", str(tmp_path / page.PAGE.name)]) == 0
    for kind in (".md", ".svg"):
        assert (tmp_path / page.PAGE.name).with_suffix(kind).read_text() == page.PAGE.with_suffix(kind).read_text()


def test_a_reused_model_goes_on_from_its_finished_run(tmp_path: Path) -> None:
    half = replace(TINY.large, layers=2)
    arm = Arm("reuse@8", half, 8, ((0.0, Growth(layers=4, fade=2)),), 1e-2, trained=20)
    training = Training(TINY, shakespeare(), "cpu", tmp_path, log=lambda text: None)
    curves = [training.run(leg) for leg in all_legs([arm], [0])["reuse@8", 0]]
    alone = [training.run(leg) for leg in stretches(Arm("small@20", half, 20, (), 1e-2), 0)]
    assert sum(curve["last"] - curve["first"] for curve in curves) == 8  # the finished run is not counted
    assert curves[0]["growth"]["before"] == pytest.approx(alone[-1]["held_out"][20], abs=1e-6)
    assert curves[0]["held_out"][0] == pytest.approx(curves[0]["growth"]["before"], abs=1e-4)


def run_of(loss: float, steps: int, flops: int, seconds: float) -> dict[str, object]:
    leg = {"first": 0, "last": steps, "step_flops": flops, "held_out": {str(steps): loss}, "seconds": seconds}
    return {"seeds": {"0": {"legs": [leg]}, "1": {"legs": [{**leg, "held_out": {str(steps): loss + 0.1}}]}}}


def test_a_saving_is_against_scratch_at_the_same_loss() -> None:
    results = {
        "scratch@100": run_of(1.0, 100, 10, 1.0),
        "scratch@400": run_of(0.8, 400, 10, 4.0),
        "grown@150": run_of(0.9, 150, 8, 1.0),
        "bad@100": run_of(1.2, 100, 8, 1.0),
    }
    found = saving_of(results, "grown@150")  # scratch takes √(1000 · 4000) = 2000 FLOPs and 2 seconds to that loss
    assert found.mean("flops") == pytest.approx(1 - 1200 / 2000)
    assert found.mean("seconds") == pytest.approx(0.5)
    estimate = found.estimate("flops")
    assert estimate is not None
    assert (estimate.n, estimate.low) == (2, pytest.approx(0.4))
    assert saving_of(results, "bad@100").mean("flops") is None
