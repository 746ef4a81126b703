"""The study of widening in small steps: budgets, steps against torch's own, rates per cohort, growths, how it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from experiments.setting.data import digits
from experiments.widening_steps import page, results, runs, speed
from experiments.widening_steps.__main__ import GOES_ON, main
from experiments.widening_steps.arms import METHODS, SETTINGS, Arm, arms, relative_flops
from experiments.widening_steps.cohort_rates import LEAST, MOST, CohortRates
from experiments.widening_steps.growing import fan_ins, grow, inner, rescale
from experiments.widening_steps.images import Images, table_of
from experiments.widening_steps.network import ResNet20, build
from experiments.widening_steps.runs import Run
from experiments.widening_steps.steps import Computing, Steps, accuracy_and_loss, plain_float32, sgd
from experiments.widening_steps.study import Study

TINY = SETTINGS["tiny"]
ARMS = {arm.name: arm for arm in arms(TINY)}


@pytest.fixture(scope="module")
def images() -> Images:
    return Images.of(digits(), TINY, "cpu")


def grown(arm: Arm, images: Images, rescaled: bool = False) -> tuple[ResNet20, torch.optim.SGD]:
    """A network after a few steps, and two growths with a few steps behind each."""
    model = build(TINY.start, TINY.channels, TINY.blocks, 3)
    optimizer = sgd(model, TINY)
    table = table_of(TINY, 3, 0, len(images.labels))
    train(model, optimizer, images, table[:3])
    for number, width in enumerate(range(TINY.start + TINY.step, TINY.width + 1, TINY.step)):
        grow(model, optimizer, arm, width, [images.batch(one) for one in table[:2]], number)
        train(model, optimizer, images, table[3:6])
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Images, table: Tensor) -> None:
    model.train()
    for one in table:
        x, target = images.batch(one)
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    optimizer.zero_grad()


def test_the_network_is_resnet_20() -> None:
    model = build(16, 3, 3, 0)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)]
    assert len(convolutions) + 1 == 20
    skips = 16 * 32 + 32 * 64 + 2 * (32 + 64)
    assert sum(parameter.numel() for parameter in model.parameters()) - skips == 269_722  # with option A


def test_arms_have_the_epochs_or_the_flops_of_scratch() -> None:
    setting = SETTINGS["cifar"]
    found = {arm.name: arm for arm in arms(setting)}
    cost = {name: relative_flops(setting, arm.stages) / setting.epochs for name, arm in found.items()}
    for name, arm in found.items():
        if arm.method and not name.endswith("-long"):
            assert arm.epochs == setting.epochs
            assert cost[name] == pytest.approx(cost["scratch-short"], abs=0.01)
        else:
            assert name == "scratch-short" or cost[name] == pytest.approx(1, abs=0.01)
    assert [width for width, _ in found["pairs"].stages] == [4, 6, 8, 10, 12, 14, 16]
    assert found["pairs"].stages == found["random-rates"].stages


def test_batches_are_cut_out_of_padded_images_and_mirrored() -> None:
    setting = SETTINGS["cifar"]
    pixels = torch.rand(6, 3, 32, 32)
    padded = F.pad(pixels, (4,) * 4)
    images = Images(padded.permute(0, 2, 3, 1).contiguous(), torch.arange(6), pixels, torch.arange(6), 32)
    table = torch.tensor([[5, 2], [0, 8], [3, 1], [0, 1]])
    x, labels = images.batch(table)
    assert torch.equal(x[0], padded[5, :, 0:32, 3:35])
    assert torch.equal(x[1], padded[2, :, 8:40, 1:33].flip(2))
    assert labels.tolist() == [5, 2]
    whole = table_of(setting, 0, 0, 300)
    assert whole.shape == (2, 4, 128)
    assert whole[:, 0].flatten().unique().numel() == 256
    assert [int(whole[:, row].max()) for row in (1, 2, 3)] == [8, 8, 1]
    assert not torch.equal(whole, table_of(setting, 0, 1, 300))


@pytest.mark.parametrize("layout", ["last", "first"])
def test_steps_are_those_of_torch(layout: str, images: Images) -> None:
    models = [build(4, 1, 1, 0) for _ in range(2)]
    optimizers = [sgd(model, TINY) for model in models]
    steps = Steps(models[0], optimizers[0], images, TINY, Computing(layout=layout), rates=False)
    table = table_of(TINY, 0, 0, len(images.labels))
    rates = torch.linspace(0.1, 0.05, steps.per_epoch)
    steps.begin(table, rates)
    for step in range(5):
        steps.replay()
        for group in optimizers[1].param_groups:
            group["lr"] = float(rates[step])
        train(models[1], optimizers[1], images, table[step : step + 1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        ours, theirs = (o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (one, other), strict=True))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_rates_per_cohort_are_ratios_of_norms_of_blocks_of_weights(images: Images) -> None:
    """Pairs stand behind the old channels: a cohort of a layer is what its growth added to a block at the upper left."""
    model, _ = grown(ARMS["pairs"], images)
    rates = CohortRates(model)
    rates.update()
    sizes = [TINY.start, TINY.start + TINY.step, TINY.width]
    for name, parameter in model.named_parameters():
        factor, weight = rates.factors[name], parameter.detach()
        if weight.ndim == 1:
            assert bool((factor == 1).all())
            continue
        ends = [[size * n // sizes[-1] for size in sizes] if n not in (1, 10) else [n] * 3 for n in weight.shape[:2]]
        norms = [math.sqrt(float(weight[: ends[0][0], : ends[1][0]].square().sum()))]
        for k in (1, 2):
            outside = weight[: ends[0][k], : ends[1][k]].clone()
            outside[: ends[0][k - 1], : ends[1][k - 1]] = 0
            norms.append(math.sqrt(float(outside.square().sum())))
        expected = torch.empty_like(weight)
        for k in (2, 1, 0):
            expected[: ends[0][k], : ends[1][k]] = min(max(norms[k] / norms[0], LEAST), MOST)
        torch.testing.assert_close(factor, expected)
        assert len(expected.unique()) == 3


def test_factors_scale_updates_as_the_library_does(images: Images) -> None:
    """With one factor per cohort, steps are those of torch's SGD with `outgrow.Pace`."""
    model, optimizer = grown(ARMS["pairs"], images)
    other, theirs = grown(ARMS["pairs"], images)
    factors = [1.0, 0.5, 2.0]
    outgrow.Pace(other, theirs).set(dict(enumerate(factors)))
    steps = Steps(model, optimizer, images, TINY, Computing(), rates=True)
    assert steps.cohort_rates is not None
    table = table_of(TINY, 0, 7, len(images.labels))
    steps.begin(table, torch.full((steps.per_epoch,), TINY.rate))
    found = outgrow.cohorts(model)
    for name, values in steps.cohort_rates.factors.items():
        values.copy_(torch.tensor(factors)[found[name].long()])
    for step in range(3):
        steps.replay()
        train(other, theirs, images, table[step : step + 1])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "random"])
def test_growths_keep_the_function_and_reach_the_size_of_scratch(name: str, images: Images) -> None:
    model, optimizer = grown(ARMS[name], images)
    assert [p.shape for p in model.parameters()] == [p.shape for p in build(TINY.width, 1, 1, 0).parameters()]
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape
    x = images.test[:64]
    in_training = model.train()(x)  # which also moves the norms' statistics
    before = accuracy_and_loss(model, images)[1]
    grow(model, optimizer, ARMS[name], TINY.width + 4, [images.batch(table_of(TINY, 0, 0, 200)[0])], 0)
    assert accuracy_and_loss(model, images)[1] == pytest.approx(before, rel=1e-5)
    if name != "net2net":  # also with the statistics of a batch
        torch.testing.assert_close(model.train()(x), in_training, rtol=1e-3, atol=1e-3)


def test_rescaled_weights_have_gradients_like_their_momenta(images: Images) -> None:
    """Both are divided by the factor that weights are multiplied by."""
    model, optimizer = grown(ARMS["pairs"], images)
    x, target = images.batch(table_of(TINY, 0, 0, 200)[0])
    weight = model.layer2[0].conv1.weight
    gradients, momenta = [], []
    for inputs in (None, [2 * n for n in fan_ins(model)]):
        if inputs is not None:
            rescale(model, optimizer, inputs)
        gradients.append(torch.autograd.grad(F.cross_entropy(model.train()(x), target), weight)[0])
        momenta.append(optimizer.state[weight]["momentum_buffer"].clone())
    torch.testing.assert_close(gradients[1] * math.sqrt(2), gradients[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(momenta[1] * math.sqrt(2), momenta[0])


def test_learned_values_are_for_blocks_alone(images: Images) -> None:
    """Why streams get drawn pairs, and why GradMax as published is left out."""
    model = build(4, 1, 1, 0)
    batches = [images.batch(table_of(TINY, 0, 0, 200)[0])]
    learned = outgrow.GradMax(batches, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]))
    for init in (learned, outgrow.North()):
        with pytest.raises(outgrow.GrowthError, match=r"\d tensors write it"):
            outgrow.widen(model, batches[0][0], "conv1", factor=1.5, method=outgrow.R2R(init=init))
    with pytest.raises(outgrow.GrowthError, match="with zero writers nothing would be learned: the slope of aten"):
        outgrow.widen(model, batches[0][0], inner(model), factor=1.5, method=outgrow.NetMorph(zero="writers", init=learned))


def test_zero_writers_would_never_learn(images: Images) -> None:
    """Why they are left out: no new entry has a gradient."""
    model = build(4, 1, 1, 0)
    x, target = images.batch(table_of(TINY, 0, 0, 200)[0])
    outgrow.widen(model, x, "*", factor=1.5, method=outgrow.NetMorph(zero="writers"), seed=0)
    F.cross_entropy(model.train()(x), target).backward()
    assert outgrow.cohorts(model).gradients(model)[1].rms < 1e-6


def a_study(tmp_path: Path, images: Images, log: Callable[[str], None]) -> Study:
    return Study(TINY, images, Computing(), tmp_path / "results", tmp_path / "work", {"command": "none"}, limit=2, log=log)


def one_epoch(tmp_path: Path, images: Images, chosen: list[Arm]) -> bool:
    """Let a study stop after an epoch of its networks; whether all is done."""

    def stop(text: str) -> None:
        study.until = float("-inf")

    study = a_study(tmp_path, images, stop)
    return study.run(chosen, [0])


def test_a_study_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, images: Images) -> None:
    chosen = [ARMS[name] for name in ("pairs-rescaled-rates", "gradmax", "scratch-short")]
    assert a_study(tmp_path / "whole", images, lambda text: None).run(chosen, [0])
    pieces = 1
    while not one_epoch(tmp_path / "cut", images, chosen):
        pieces += 1
    assert pieces > 5
    assert not list((tmp_path / "cut" / "work").iterdir())
    for arm in chosen:
        one, other = (results.read(tmp_path / name / "results")[arm.name]["seeds"]["0"] for name in ("whole", "cut"))
        for key in ("train_loss", "epochs", "accuracy", "factors", "flops"):
            assert one[key] == other[key], key
        assert len(one["train_loss"]) == arm.epochs
        assert [growth["epoch"] for growth in one["growths"]] == ([2, 4] if arm.method else [])
        assert len(one["factors"]) == (3 if arm.rates else 0)


def test_a_growth_that_changes_the_loss_stops_the_study(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(model: ResNet20, *others: Any) -> dict[str, Any]:
        record = grow(model, *others)
        model.layer3[0].conv1.weight.data.mul_(-1)
        return record

    monkeypatch.setattr(runs, "grow", careless)
    with pytest.raises(AssertionError, match="a growth took the test loss"):
        a_study(tmp_path, images, lambda text: None).run([ARMS["pairs"]], [0])


def test_a_run_whose_loss_is_not_finite_ends(tmp_path: Path, images: Images) -> None:
    run = Run(ARMS["pairs"], 0, TINY, Computing(), tmp_path)
    run.board(images)
    assert run.model is not None
    run.model.fc.weight.data.fill_(float("nan"))
    assert run.steps is not None
    run.steps.replay()
    run.close(1.0)
    assert run.ended
    found = json.loads(json.dumps(run.result(), allow_nan=False))
    assert found["diverged"]
    assert found["test_loss"][-1] is None


def test_the_command_goes_on_and_its_results_make_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["--setting", "tiny", "--results", str(tmp_path / "results")]
    options = [*shared, "--work", str(tmp_path / "work"), "--seeds", "2", "--arms", "scratch", "scratch-short", "pairs*s"]
    assert page.main([*shared, "--out", str(tmp_path / "page.md")]) == 2
    assert main([*options, "--minutes", "0"]) == GOES_ON
    assert main(options) == 0
    assert main([*options, "--minutes", "0"]) == 0
    folder = tmp_path / "results" / "tiny"
    assert sorted(results.read(folder)) == ["pairs-rates", "pairs-rescaled-rates", "scratch", "scratch-short"]
    text = (folder / "pairs-rates.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "python -m experiments.widening_steps --setting tiny" in json.loads(text)["seeds"]["1"]["command"]
    with pytest.raises(SystemExit, match="another description"):
        main([*options, "--epochs", "7"])
    assert speed.main([*shared, "--networks", "2"]) == 0
    assert page.main([*shared, "--out", str(tmp_path / "page.md")]) == 0
    written = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "| `pairs-rescaled-rates` |" in written
    assert "2 side by side" in written
    accuracies = [one["final_accuracy"] for one in results.read(folder)["scratch"]["seeds"].values()]
    assert f"| `scratch` | {50 * sum(accuracies):.2f} [" in written
    assert "in 2 equal steps" in written


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ["last", "first"])
def test_graphs_make_the_steps_of_the_cpu(layout: str, images: Images) -> None:
    found = []
    for device in ("cpu", "cuda"):
        there, how = Images.of(digits(), TINY, device), Computing(device, layout=layout)
        models = [build(6, 1, 1, seed).to(device) for seed in (0, 1, 2)]
        with plain_float32():
            fleet = [Steps(model, sgd(model, TINY), there, TINY, how, rates=True) for model in models]
            for epoch in (0, 1):
                for one in fleet:
                    one.begin(table_of(TINY, 0, epoch, len(images.labels)), torch.full((one.per_epoch,), 1e-3))
                how.epoch(fleet, how.streams(3))
        found.append([float(one.lost) / one.per_epoch for one in fleet])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_study_runs_on_a_gpu_and_goes_on(precision: str, tmp_path: Path) -> None:
    options = ["--setting", "tiny", "--device", "cuda", "--precision", precision, "--results", str(tmp_path / "results")]
    options += ["--work", str(tmp_path / "work")]
    assert main([*options, "--minutes", "0.05"]) == GOES_ON
    assert main(options) == 0
    found = results.read(tmp_path / "results" / "tiny")
    assert all(arm["seeds"]["0"]["final_accuracy"] > 0.7 for arm in found.values())


def test_the_page_is_that_of_the_kept_results(tmp_path: Path) -> None:
    if page.main(["--out", str(tmp_path / "page.md")]) == 2:
        assert not page.PAGE.exists()
        return
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page.PAGE.read_text(encoding="utf-8")
