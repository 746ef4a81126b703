"""The experiments: every arm runs, pieces are shared, interrupted runs go on, and one arm learns for real."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import agreement
from experiments.__main__ import command_of, main, parse, quick, seeds_of
from experiments.reading.result_files import ResultsError, file_name, read_all, write_arm, write_filters
from experiments.setting import data as data_module
from experiments.setting.appendix_b import appendix_b_arms
from experiments.setting.arms import Arm, Grow, Stage, paper_arms
from experiments.setting.data import DataError, batches, cifar10, digits
from experiments.setting.flops import step_flops
from experiments.setting.models import Net, ResNetCifar, SmallConv
from experiments.setting.more_arms import more_arms
from experiments.setting.segments import all_segments, segments_of
from experiments.training.eager import Eager, shape_of
from experiments.training.store import Store, StoreError
from experiments.training.train_segments import Training
from experiments.training.trainee import rate_at
from tests.helpers.experiment_runs import short, some_data, training

PRESERVING = ("r2r", "r2r-paper", "netmorph", "netmorph-writers", "net2net")
SETS = {"paper": paper_arms, "more": more_arms, "appendix B": appendix_b_arms}


def test_every_kind_of_arm_runs_for_two_steps(tmp_path: Path) -> None:
    """One arm for each network and its growths: those of the paper's three tests differ in their rates alone."""
    every = [short(arm) for which in ("paper", "appendix B") for arm in SETS[which]()]
    one_of_each = {(arm.net, arm.optimizer, *(stage.grow for stage in arm.stages)): arm for arm in every}
    run_and_check(list(one_of_each.values()), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("which", SETS)
def test_every_arm_runs_for_two_steps(which: str, tmp_path: Path) -> None:
    run_and_check([short(arm) for arm in SETS[which]()], tmp_path)


def run_and_check(arms: list[Arm], tmp_path: Path) -> None:
    assert training(arms, tmp_path / "work", some_data()).run()
    store = Store(tmp_path / "work")
    for arm in arms:
        write_arm(tmp_path, arm, [0], store, {"command": "test"})
    for arm in arms:
        for segment in segments_of(arm, 0)[1:]:
            state = store.state(segment)
            assert state is not None
            if segment.stage.grow is None:
                continue
            grown, before = state["curve"], store.state(segment.parent)["curve"]  # type: ignore[index, arg-type]
            kept = segment.stage.grow.method in PRESERVING and not segment.stage.grow.noise
            assert grown["growth"]["preserving"] == kept
            if kept:
                assert grown["growth"]["error"] < 1e-3
                assert math.isclose(grown["test_loss"][0], before["test_loss"][-1], rel_tol=1e-3)
            else:
                assert grown["growth"]["error"] > 1e-3
            assert len(grown["steps"]) == 2
    results = read_all(tmp_path)
    assert {arm.name for arm in arms} == set(results)
    assert all(len(results[arm.name]["curves"]["0"]) == len(arm.stages) - arm.own for arm in arms)


def test_arms_reach_the_sizes_of_the_paper() -> None:
    for arm in paper_arms():
        if arm.test == "VIZ":
            continue
        grows = [stage.grow for stage in arm.stages if stage.grow]
        width = arm.net.r * math.prod(grow.factor for grow in grows if grow.what == "widen")
        assert width in (1 / 8, 3 / 16), arm.name
        if any(grow.what == "deepen" for grow in grows):
            assert arm.net == Net(r=3 / 16, blocks=2, residual="Net2Deeper" not in arm.name), arm.name
        assert sum(stage.epochs for stage in arm.stages[arm.own :]) == {"BI": 120}.get(arm.test, 250), arm.name


def test_arms_have_names_of_their_own() -> None:
    names = [arm.name for make in SETS.values() for arm in make()]
    assert len(set(map(file_name, names))) == len(set(names)) == len(names)


def test_the_deepened_network_is_the_widened_one(tmp_path: Path) -> None:
    """12/24 channels and four blocks in each stage, 52 thousand parameters, as in the author's code."""
    for name in ("NCT-R2WiderR", "NCT-R2DeeperR"):
        arm = short(next(arm for arm in paper_arms() if arm.name == name))
        assert training([arm], tmp_path / name, some_data()).run()
        state = Store(tmp_path / name).state(segments_of(arm, 0)[-1])
        assert state is not None
        sizes = {key: value.shape for key, value in state["model"].items()}
        assert sizes == {key: value.shape for key, value in Net(r=3 / 16).build(0).state_dict().items()}
        assert state["curve"]["growth"]["parameters"][1] == 52_198


def test_experiments_use_the_public_calls_alone() -> None:
    import outgrow

    for path in (Path(__file__).parents[2] / "experiments").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"(?:from|import) outgrow\.", text), path
        assert set(re.findall(r"\boutgrow\.([A-Za-z_]\w*)\b(?=[(,)\]]| )", text)) <= set(outgrow.__all__), path


def test_what_arms_share_is_trained_once() -> None:
    arms = [arm for arm in paper_arms() if arm.name in ("FTT-R2WiderR", "FTT-NetMorph", "NCT-RandomDeep", "NCT-RandomWide")]
    segments = all_segments(arms, [0, 1])
    assert len(segments) == 2 * (1 + 2 + 1)  # one beginning, two ways on; and two names for one network
    assert all(segment.parent is None or segment.parent in segments[:number] for number, segment in enumerate(segments))


GROWS = {"widen": Grow("widen", "r2r", 2), "fade": Grow("deepen", "copy", fade=7), "drift": Grow("widen", "random", 2, fade=7)}


@pytest.mark.parametrize("what", GROWS)
def test_interrupted_training_goes_on_as_if_nothing_had_happened(what: str, tmp_path: Path) -> None:
    """Also in the middle of a fade, and where not all networks fit into a fleet."""
    start = Stage(1.5, 1e-3, 1e-3, span=1.5)
    arm = Arm("A", Net(r=1 / 16, blocks=2), (start, Stage(2, 1e-3, 0, GROWS[what], state="kept")), flips=True)
    data, seeds = some_data(24), (0, 1)
    assert training([arm], tmp_path / "whole", data, seeds=seeds).run()
    attempts, done = 0, False
    while not done:
        attempts += 1
        # the first one stops before it has made a step
        until, clock = 1.5 if attempts > 1 else 0.5, itertools.count(1)
        part = training([arm], tmp_path / "parts", data, seeds=seeds, until=until, limit=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("experiments.training.train_segments.time.monotonic", clock.__next__)
            done = part.run()
    assert attempts > 2
    for segment in all_segments([arm], seeds):
        whole, parts = Store(tmp_path / "whole").state(segment), Store(tmp_path / "parts").state(segment)
        assert whole is not None
        assert parts is not None
        assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())
        for name in ("epoch", "accuracy", "train_loss", "steps", "flops"):
            assert whole["curve"][name] == parts["curve"][name]


class Cramped(Eager):
    """On a device that has room for two networks."""

    def __init__(self, models: Any, *what: Any, **more: Any) -> None:
        if len(models) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().__init__(models, *what, **more)


def test_fleets_are_as_large_as_the_device_allows(tmp_path: Path) -> None:
    arms, data, told = [Arm("A", Net(r=1 / 16), (Stage(1, 1e-3, 0),))], some_data(16), list[str]()
    whole = training(arms, tmp_path / "whole", data, seeds=(0, 1, 2, 3, 4, 5))
    assert whole.run()
    segments = whole.segments
    small = Training(
        segments, data, Cramped, shape_of, Store(tmp_path / "small"), lambda done, text: told.append(text), batch=8
    )
    assert small.run()
    assert "6 networks at once do not fit into the device's memory: 3 from here on" in told
    assert small.limit == 1
    for segment in segments:
        one, other = whole.store.state(segment), small.store.state(segment)
        assert one is not None
        assert other is not None
        assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
        assert one["curve"]["accuracy"] == other["curve"]["accuracy"]


def test_one_arm_learns_real_digits(tmp_path: Path) -> None:
    """The widened network goes on from what the small one has learned, and both learn."""
    stages = Stage(4, 1e-2, 1e-4), Stage(2, 1e-2 / 5, 1e-4, Grow("widen", "r2r", 2))
    arm = Arm("FTT", Net("digits", r=8 / 64, blocks=1), stages)
    assert training([arm], tmp_path, digits(), batch=32).run()
    first, second = (Store(tmp_path).state(segment)["curve"] for segment in segments_of(arm, 0))  # type: ignore[index]
    assert first["accuracy"][0] < 0.3
    assert first["accuracy"][-1] > 0.65
    assert second["accuracy"][0] == first["accuracy"][-1]
    assert second["accuracy"][-1] > first["accuracy"][-1]
    assert second["flops"][-1] / 2 > 2 * first["flops"][-1] / 4  # a step of the wide one costs more than twice as much


def test_the_eager_engine_is_a_plain_loop() -> None:
    data = some_data(32)
    torch.manual_seed(0)
    models = [ResNetCifar(1 / 16, 1), SmallConv(4)]
    hand = [ResNetCifar(1 / 16, 1), SmallConv(4)]
    for one, other in zip(models, hand, strict=True):
        other.load_state_dict(one.state_dict())
    order, _ = batches(3, 0, 32, 8, 4)
    optimizers = [torch.optim.Adam(model.parameters(), amsgrad=True) for model in models]
    engine = Eager(models, optimizers, [0, 0], 8)
    engine.feed(data.images, data.labels, data.mean, data.deviation)
    engine.begin(order[None], torch.full((2, 4), 1e-2), torch.full((2, 4), 1e-3))
    losses, right = engine.run()
    assert right.shape == losses.shape
    assert bool(((right * 8).frac() == 0).all())  # shares of a batch of eight
    for number, model in enumerate(hand):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3, amsgrad=True)
        for step in range(4):
            x = (data.images[order[step]].float() / 255 - 0.5) / 0.25
            loss = torch.nn.functional.cross_entropy(model(x), data.labels[order[step]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert torch.allclose(loss.detach(), losses[number, step], rtol=1e-4)


def test_flops_are_those_of_the_convolutions_by_hand() -> None:
    step, forward = step_flops(SmallConv(16))
    multiplications = 32 * 32 * 16 * 3 * 49 + 16 * 16 * 16 * 150 + 150 * 10
    assert forward == 2 * multiplications
    images = 2 * 32 * 32 * 16 * 3 * 49  # the gradient of the image is not needed
    assert step == 3 * forward - images


def test_rates() -> None:
    assert rate_at(7, 0, 0.3) == 0.3
    rates = [rate_at(step, 100, 1.0) for step in range(100)]
    assert rates.index(max(rates)) in (4, 5)
    assert rates[0] == 0.2
    assert rates[-1] < 1e-3


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    order, flips = batches(1, 2, 100, 10, 10)
    again, same = batches(1, 2, 100, 10, 10)
    assert torch.equal(order, again)
    assert torch.equal(flips, same)
    assert sorted(order.flatten().tolist()) == list(range(100))
    assert not torch.equal(order, batches(1, 3, 100, 10, 10)[0])
    assert not torch.equal(order, batches(2, 2, 100, 10, 10)[0])


def write_cifar(folder: Path, patch: pytest.MonkeyPatch, images: int = 128) -> None:
    """Small files in the official format, whose digests are taken for the right ones."""
    generator = torch.Generator().manual_seed(0)
    digests = {}
    for name in data_module.DIGESTS:
        records = torch.randint(0, 10, (images, data_module.RECORD), dtype=torch.uint8, generator=generator).numpy().tobytes()
        (folder / name).write_bytes(records)
        digests[name] = hashlib.md5(records, usedforsecurity=False).hexdigest()
    patch.setattr(data_module, "DIGESTS", digests)


def test_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=re.escape("There is no CIFAR-10 in")):
        cifar10(tmp_path)
    write_cifar(tmp_path, monkeypatch)
    data = cifar10(tmp_path)
    assert data.images.shape == (640, 3, 32, 32)
    raw = (tmp_path / "data_batch_2.bin").read_bytes()
    assert int(data.labels[128 + 5]) == raw[5 * 3073]
    assert int(data.images[128 + 5, 2, 31, 30]) == raw[5 * 3073 + 1 + 2 * 1024 + 31 * 32 + 30]
    (tmp_path / "data_batch_3.bin").write_bytes(raw[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"data_batch_3.bin is damaged"):
        cifar10(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3.bin is missing"):
        cifar10(tmp_path)


def test_records_are_label_red_green_blue_row_by_row(tmp_path: Path) -> None:
    path, pixels = tmp_path / "data_batch_1.bin", bytearray([10] * 1024 + [20] * 1024 + [30] * 1024)
    pixels[1 * 32 + 2] = 99  # the red of the pixel in row 1, column 2
    path.write_bytes(bytes([7]) + bytes(pixels))
    images, labels = data_module.read_records(path, hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest())
    assert (images.shape, labels.tolist()) == ((1, 3, 32, 32), [7])
    assert images[0, :, 0, 0].tolist() == [10, 20, 30]
    assert images[0, 0, 1, 2] == 99
    assert (images[0] == torch.tensor([10, 20, 30]).view(3, 1, 1)).sum() == 3 * 1024 - 1


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_cifar(tmp_path, monkeypatch, images=52)  # in each of five files
    place = ["--data", str(tmp_path), "--work", str(tmp_path / "work"), "--results", str(tmp_path / "results")]
    assert main(["OF-Rand", "--seeds", "1", *place]) == 0
    result = json.loads((tmp_path / "results" / "OF-Rand.json").read_text())
    assert (
        result["command"] == "python -m experiments OF-Rand --set paper --preset quick --device cpu --precision tf32 --seeds 1"
    )
    assert len(result["curves"]["0"][0]["accuracy"]) == 6  # before the first epoch, and after each of five
    before = (tmp_path / "results" / "OF-Rand.json").read_bytes()
    assert main(["OF-Rand", "--seeds", "1", *place]) == 0
    assert "0 left" in capsys.readouterr().out
    assert (tmp_path / "results" / "OF-Rand.json").read_bytes() == before
    (tmp_path / "results" / "OF-Rand.json").write_text(json.dumps({**result, "arm": {**result["arm"], "flips": True}}))
    with pytest.raises(SystemExit, match="by another description"):
        main(["OF-Rand", "--seeds", "1", *place])
    (tmp_path / "results" / "OF-Rand.json").write_text(json.dumps({**result, "format": 0}))
    with pytest.raises(SystemExit, match="is of format 0"):
        main(["OF-Rand", "--seeds", "1", *place])
    with pytest.raises(SystemExit, match="there is no arm OF-Ran: did you mean OF-Rand"):
        main(["OF-Ran", *place])
    with pytest.raises(SystemExit, match="--seeds x: write how many"):
        main(["OF-Rand", "--seeds", "x", *place])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="there is no device 'cuda'"):
            main(["OF-Rand", "--device", "cuda", *place])


def test_files_of_another_version_are_refused(tmp_path: Path) -> None:
    arm = Arm("A", Net(r=1 / 16, blocks=1), (Stage(1, 1e-3, 0),))
    assert training([arm], tmp_path, some_data()).run()
    path = Store(tmp_path).path(segments_of(arm, 0)[0])
    torch.save({**torch.load(path, weights_only=True), "format": 0}, path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another version"):
        training([arm], tmp_path, some_data()).run()
    assert path.read_bytes() == before
    (tmp_path / file_name("A")).write_text("{}")
    with pytest.raises(ResultsError, match="is no results file"):
        read_all(tmp_path)


def test_more_seeds_join_those_that_are_there(tmp_path: Path) -> None:
    arm = short(paper_arms()[3])
    assert training([arm], tmp_path / "work", some_data(), seeds=(0, 1, 2)).run()
    store = Store(tmp_path / "work")
    write_arm(tmp_path, arm, [1], store, {"command": "one"})
    before = read_all(tmp_path)[arm.name]
    write_arm(tmp_path, arm, [0, 2], store, {"command": "two"})
    after = read_all(tmp_path)[arm.name]
    assert after["seeds"] == [0, 1, 2]
    assert list(after["curves"]) == ["0", "1", "2"]
    assert after["curves"]["1"] == before["curves"]["1"]
    assert after["command"] == "one; two"
    write_arm(tmp_path, arm, [0, 2], store, {"command": "two"})
    assert read_all(tmp_path)[arm.name] == after


def test_looks(tmp_path: Path) -> None:
    """An arm is looked at as often as it says; how often changes nothing in its training, alone or beside others."""
    plain = Arm("A", Net(r=1 / 16), (Stage(2.5, 1e-3, 1e-3),))
    seen = {}
    for looks in (0, 1, 4):
        arms = [replace(plain, name=str(looks), stages=(replace(plain.stages[0], looks=looks),))]
        work = training(arms, tmp_path / str(looks), some_data(64))
        assert work.run()
        state = work.store.state(segments_of(arms[0], 0)[0])
        assert state is not None
        seen[looks] = state
    assert seen[0]["curve"]["epoch"] == [0, 2.5]
    assert seen[1]["curve"]["epoch"] == [0, 1, 2, 2.5]
    assert seen[4]["curve"]["epoch"] == [0.25 * step for step in range(11)]
    for looks in (1, 4):
        assert seen[looks]["curve"]["steps"] == seen[1]["curve"]["steps"]
        assert all(torch.equal(value, seen[0]["model"][name]) for name, value in seen[looks]["model"].items())
    spent = seen[1]["curve"]["steps"]
    assert seen[0]["curve"]["steps"] == []
    assert seen[0]["curve"]["train_loss"][1] == pytest.approx(sum(spent) / len(spent), abs=1e-4)


def test_filters_are_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    arm = short(paper_arms()[0])
    assert training([arm], tmp_path, some_data()).run()
    write_filters(tmp_path, arm, [0], Store(tmp_path))
    filters = load_file(tmp_path / "filters.safetensors")
    before, after = filters["VIZ-R2R/0/before"], filters["VIZ-R2R/0/after"]
    assert after.shape == filters["VIZ-R2R/0/end"].shape == (32, 3, 7, 7)
    assert torch.equal(after[:16], before)
    assert torch.equal(after[16:24], after[24:])  # pairs


def test_options() -> None:
    assert seeds_of(None, "paper") == [0, 1, 2, 3, 4]
    assert seeds_of("2", "paper") == [0, 1]
    assert seeds_of("0,3", "paper") == [0, 3]
    assert seeds_of("3,", "paper") == [3]
    assert [stage.epochs for stage in quick(paper_arms()[0]).stages] == [3, 9]
    assert "--engine" not in command_of(parse([]))


@pytest.mark.parametrize("arms", [("BI-Std", "APB-R2DeeperR"), pytest.param(agreement.ARMS, marks=pytest.mark.exhaustive)])
def test_engines_are_compared_on_the_same_networks_and_batches(arms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "STEPS", 10)
    monkeypatch.setattr(agreement, "ARMS", arms)
    engines = {"eager": (Eager, shape_of), "again": (Eager, shape_of), "one ulp off": (agreement.Jostled, shape_of)}
    result = agreement.compare(some_data(80), "cpu", engines, batch=8)
    for arm in arms:
        assert len(result["losses"]["eager"][arm]) == 10
        assert agreement.apart(result, "again", arm, 10) == 0
        assert agreement.apart(result, "one ulp off", arm, 10) > 0
        assert agreement.apart(result, "one ulp off", arm, 1) < 1e-4
