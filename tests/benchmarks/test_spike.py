"""The pieces of the no-spike benchmark: its batches, its twin, and a tiny run from end to end."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from benchmarks import cifar_batches, learning, spike, spike_arms, spike_page
from experiments.setting.data import COLOURS
from tests.helpers.experiment_runs import some_data


def random_images(count: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def test_batches_are_shifted_or_mirrored_images_and_the_same_for_everyone() -> None:
    images, labels = random_images(8)
    batches = cifar_batches.Batches(images, labels, 8, seed=3)
    x, y = batches(5)
    again, _ = cifar_batches.Batches(images, labels, 8, seed=3)(5)
    assert torch.equal(x, again)
    assert not torch.equal(x, batches(6)[0])
    assert not torch.equal(x, cifar_batches.Batches(images, labels, 8, seed=4)(5)[0])
    mean, deviation = (255 * torch.tensor(row).view(3, 1, 1) for row in COLOURS)
    padded = F.pad(images, (4, 4, 4, 4))
    seen = []
    for picture, label in zip((x * deviation + mean).round().to(torch.uint8), y, strict=True):
        views = [
            (number, flipped)
            for number in range(8)
            for flipped in (False, True)
            for down in range(9)
            for right in range(9)
            if torch.equal(picture.flip(2) if flipped else picture, padded[number, :, down : down + 32, right : right + 32])
        ]
        assert len(views) == 1, "an image of the set, cut out somewhere"
        assert labels[views[0][0]] == label
        seen.append(views[0])
    assert sorted(number for number, _ in seen) == list(range(8))
    assert {flipped for _, flipped in seen} == {False, True}


TINY = spike.Settings(epochs=2, batch=16, steps=4, compared=2)


@pytest.mark.parametrize(("model", "optimizer"), [("resnet", "adamw"), ("resnet", "sgd"), ("vit", "adamw")])
def test_the_twin_is_the_training_that_goes_on(model: str, optimizer: str) -> None:
    batches = cifar_batches.Batches(*random_images(), 16, seed=0)
    whole = spike.begin(model, optimizer, 0, 12, TINY, "cpu").run(batches, 7)
    training = spike.begin(model, optimizer, 0, 12, TINY, "cpu")
    first = training.run(batches, 3)
    before = copy.deepcopy(training.model.state_dict())
    twin = spike.measure(training, spike.TWIN, batches, 0, TINY)
    assert torch.equal(torch.cat([first, torch.tensor(twin["losses"])]).round(decimals=4), whole.round(decimals=4))
    assert twin["train_loss"] == pytest.approx([float(whole[3])] * 2, rel=1e-5)
    after = training.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "the snapshot is there for the next arm"
    assert training.step == 3


def test_new_weights_are_those_the_old_model_did_not_have() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, torch.randn(5, 3), "0", to=8, method="r2r")
    masks = learning.new_weights(model, growth.plan)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"0.weight": 12, "0.bias": 4, "2.weight": 8}
    for name, mask in masks.items():
        kept = model.get_parameter(name)[~mask]
        assert torch.equal(kept, old.get_parameter(name).flatten())
    watch = learning.Learning(model, growth.plan)
    with torch.no_grad():
        model[0].weight *= 0.9  # as weight decay does
    assert (watch.shares()["moved"], watch.shares()["learned"]) == (0.5, 0.0)
    model(torch.ones(1, 3)).sum().backward()
    watch.look()
    assert 0 < watch.shares()["learned"] <= 0.5


def test_all_weights_of_a_new_block_are_new() -> None:
    network = spike.MODELS["vit"]()
    growth = outgrow.deepen(network, torch.randn(2, 3, 32, 32), "blocks.1")
    masks = learning.new_weights(network, growth.plan)
    assert set(masks) == {name for name, _ in network.named_parameters() if name.startswith("blocks.2.")}
    assert all(mask.all() for mask in masks.values())


def test_every_arm_has_a_name_of_its_own_and_can_be_selected() -> None:
    for model in spike.MODELS:
        arms = spike_arms.arms_of(model)
        assert len({(arm.kind, arm.name) for arm in arms}) == len(arms)
        assert arms[0] is spike_arms.TWIN


def test_a_tiny_run_measures_everything_and_its_page_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spike, "cifar10", lambda folder: some_data(96))
    out = tmp_path / "spike.json"
    more = ["--seeds", "1", "--epochs", "2", "--batch", "16", "--steps", "4", "--models", "resnet", "--only", "deepen r2r*"]
    spike.main(["--data", str(tmp_path), "--device", "cpu", "--out", str(out), *more])
    data = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text()
    assert {"command", "versions", "machine", "configuration", "limits", "seconds"} <= set(data)
    assert len(data["results"]) == 2 * 3  # optimizers; the twin and two arms
    for result in data["results"]:
        grown = result["group"] != "twin"
        assert len(result["losses"]) == 4
        assert result["mean"] == pytest.approx(sum(result["losses"]) / 4, abs=1e-4)
        assert (result["ratio"] == 1.0) or grown
        if grown:
            assert result["preserving"]
            assert result["error"] <= result["tolerance"]
            assert result["new_weights"] == result["parameters"][1] - result["parameters"][0] > 0
            assert 0 <= result["learned"] <= min(result["gradient"], result["moved"]) <= 1
            assert result["eval_loss"][1] == pytest.approx(result["eval_loss"][0], rel=1e-4)
            assert result["train_loss"][1] == pytest.approx(result["train_loss"][0], rel=1e-4)
    text = spike_page.page(data)
    assert text.count("| deepen | r2r |") == 2
    assert all(len(line) <= 128 or line.startswith("|") for line in text.splitlines())


def test_missing_data_ends_the_benchmark_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="There is no CIFAR-10 in"):
        spike.main(["--data", str(tmp_path)])


def test_the_worst_seed_decides() -> None:
    def verdict(ratios: tuple[float, ...], learned: float = 1.0, preserving: bool = True) -> str:
        return spike_page.Row("resnet", "adamw", "deepen", "x", "ours", preserving, "1", 0.0, ratios, learned).verdict

    assert verdict((1.0, 1.09)) == "pass"
    assert verdict((1.0, 1.11)) == "spike in the worst seed"
    assert verdict((1.1, 1.2)) == "SPIKE"
    assert verdict((1.0, 1.0), learned=0.94) == "DEAD"
    assert verdict((2.0, 2.0), preserving=False) == "–"
