"""Engines beside the plain loop, fleets side by side, and what is measured on the way."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.setting import appendix_b
from experiments.setting.appendix_b import appendix_b_arms, loss
from experiments.setting.arms import Arm, Stage, paper_arms, widen
from experiments.setting.data import batches
from experiments.setting.models import Net
from experiments.setting.segments import all_segments, segments_of
from experiments.setting.three_blocks import PaddedBlock, ThreeBlocks
from experiments.training.eager import Eager, shape_of
from experiments.training.graphs import Graphs
from experiments.training.store import Store
from experiments.training.train_segments import Training
from tests.helpers.experiment_runs import short, some_data, training


def test_graphs_are_the_plain_loop() -> None:
    """Without CUDA nothing is captured. Not on appendix B's network: its pairs get gradients of rounding alone at first."""
    data = some_data(32)
    models = [Net(r=1 / 16, blocks=1).build(seed) for seed in (0, 1)]
    found = []
    for engine in (Eager, Graphs):
        twins = copy.deepcopy(models)
        optimizers = [torch.optim.Adam(model.parameters(), lr=1.0, amsgrad=True) for model in twins]
        made = engine(twins, optimizers, [0, 1], 8, loss=loss)
        made.feed(data.images, data.labels, data.mean, data.deviation)
        made.examine((data.test_images, data.test_labels))
        for epoch in (0, 1):
            order = torch.stack([batches(seed, epoch, 32, 8, 4)[0] for seed in (0, 1)])
            made.begin(order, torch.tensor([[1e-3] * 4, [2e-3] * 4]), torch.tensor([[1e-3] * 4, [0.0] * 4]))
            made.start(evaluate=True)
            assert made.ready()
            losses, right, evaluated = made.finish()
            found.append((losses.clone(), right.clone(), *evaluated[0], *(p.detach().clone() for p in twins[0].parameters())))
        made.land()
        assert all(float(state["step"]) == 8 for optimizer in optimizers for state in optimizer.state.values())
        assert optimizers[1].param_groups[0]["lr"] == pytest.approx(2e-3)
    for epoch in (0, 1):
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found[epoch], found[2 + epoch], strict=True))


def test_the_loss_of_appendix_b() -> None:
    logits, labels = torch.tensor([[2.0, -1.0]]), torch.tensor([0])
    by_hand = -(torch.sigmoid(torch.tensor(2.0)).log() + (1 - torch.sigmoid(torch.tensor(-1.0))).log()) / 2
    assert torch.allclose(loss(logits, labels), by_hand)


def test_the_network_of_appendix_b() -> None:
    """Blocks are identities at first, and the third one changes nothing when it comes."""
    torch.manual_seed(0)
    block, x = PaddedBlock(16, 64, 32), torch.randn(4, 16, 8, 8)
    assert torch.allclose(block(x)[:, :16], x, atol=1e-4)
    assert float(block(x)[:, 16:].detach().abs().max()) < 1e-4
    model, x = ThreeBlocks(2, 2), torch.randn(4, 3, 32, 32)
    before = model(x)
    model.add_block(3)
    assert torch.allclose(model(x), before, atol=1e-4)
    large = appendix_b.LARGE.build(0)
    assert {name: p.shape for name, p in model.named_parameters()} == {name: p.shape for name, p in large.named_parameters()}


def test_rates_of_appendix_b() -> None:
    """At a growth the rate is multiplied by the share of parameters that were there; all arms make 6,000 updates."""
    for arm in appendix_b_arms():
        assert sum(round(stage.epochs * appendix_b.EPOCH) for stage in arm.stages) == 6_000
        before = sum(p.numel() for p in arm.net.build(0).parameters())
        after = sum(p.numel() for p in ThreeBlocks(2, 3).parameters())
        assert arm.stages[-1].rate == pytest.approx(3e-3 * before / after)
        assert arm.stages[-1].decay == pytest.approx(1e-6 * before / after)


def test_a_growth_before_the_first_step(tmp_path: Path) -> None:
    arm = short(next(arm for arm in appendix_b_arms() if arm.name == "APB3-R2WiderR@0"))
    assert len(arm.stages) == 1
    work = training([arm], tmp_path, some_data())
    assert work.run()
    state = work.store.state(segments_of(arm, 0)[0])
    assert state is not None
    assert state["curve"]["growth"]["parameters"] == [259_226, 579_386]
    assert training([arm], tmp_path, some_data()).run()


def test_fleets_side_by_side_change_nothing(tmp_path: Path) -> None:
    """What is trained, and in which order a network sees its batches, does not depend on how many fleets there are."""
    arms = [
        short(arm) for arm in paper_arms() if arm.name in ("BI-Std", "BI-He", "NCT-Net2WiderNet", "NCT-R2DeeperR", "OF-Rand")
    ]
    data = some_data(24).validated()
    for together in (1, 3):
        assert training(arms, tmp_path / str(together), data, together=together).run()
    for segment in all_segments(arms, [0]):
        one, other = (Store(tmp_path / str(together)).state(segment) for together in (1, 3))
        assert one is not None
        assert other is not None
        assert all(torch.equal(value, other["model"][name]) for name, value in one["model"].items())
        assert one["curve"]["accuracy"] == other["curve"]["accuracy"]


def test_a_shape_that_waits_for_others_comes_after_them(tmp_path: Path) -> None:
    """Fleets are formed late, so that they are large."""
    sizes: list[tuple[int, ...]] = []

    class Watched(Eager):
        def __init__(self, models: Any, *what: Any, **more: Any) -> None:
            super().__init__(models, *what, **more)
            sizes.append((models[0].conv1.out_channels, len(models)))

    arms = [short(arm) for arm in paper_arms() if arm.name in ("BI-Std", "BI-He", "OF-Rand", "NCT-R2DeeperR")]
    work = Training(all_segments(arms, [0]), some_data(), Watched, shape_of, Store(tmp_path), batch=8, together=3)
    assert work.run()
    assert set(sizes[:2]) == {(12, 1), (8, 1)}  # the shallow one and the small one
    assert sizes[2:] == [(12, 4)]  # all that they grow to, and the one from scratch


def test_validation_and_running_accuracy(tmp_path: Path) -> None:
    """The validation set is held out of training and evaluated beside the test set; batches are counted before their step."""
    whole = some_data(44)
    data = whole.validated(4)
    assert torch.equal(torch.cat([data.images, data.validation_images]), whole.images)  # type: ignore[list-item]
    assert data.name == "CIFAR-10, 4 training images for validation"
    assert len(data.first(16, 2).validation_labels) == 2  # type: ignore[arg-type]
    arm = Arm("A", Net(r=1 / 16, blocks=1), (Stage(2, 1e-3, 0),))
    work = training([arm], tmp_path, data)
    assert work.run()
    state = work.store.state(segments_of(arm, 0)[0])
    assert state is not None
    curve, model = state["curve"], arm.net.build(0)
    model.load_state_dict(state["model"])
    model.eval()
    for images, labels, seen in (
        (data.test_images, data.test_labels, "accuracy"),
        (data.validation_images, data.validation_labels, "validation_accuracy"),
    ):
        with torch.no_grad():
            logits = model((images.float() / 255 - 0.5) / 0.25)  # type: ignore[union-attr]
        assert curve[seen][-1] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), abs=1e-6)
    assert curve["validation_loss"][-1] == pytest.approx(float(cross_entropy(logits, labels)), abs=1e-4)
    by_hand = replay(arm, data)
    assert curve["running_accuracy"] == [None, *(pytest.approx(value, abs=1e-5) for value in by_hand)]


def replay(arm: Arm, data: Any) -> list[float]:
    """The share of each epoch's batches that is right before the step that they cause."""
    model = arm.net.build(0).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    found = []
    for epoch in (0, 1):
        right = []
        for chosen in batches(0, epoch, 40, 8, 5)[0]:
            logits = model((data.images[chosen].float() / 255 - 0.5) / 0.25)
            right.append(float((logits.argmax(1) == data.labels[chosen]).float().mean()))
            optimizer.zero_grad()
            cross_entropy(logits, data.labels[chosen]).backward()
            optimizer.step()
        found.append(sum(right) / len(right))
    return found


def test_noise_and_zero_writers_reach_the_growth(tmp_path: Path) -> None:
    start = Stage(1, 1e-3, 0)
    for name, grow, exact in (
        ("writers", widen("netmorph-writers", 2), True),
        ("noise", widen("r2r", 2, noise=0.01), False),
        ("large", widen("r2r", 2, scale=10.0), True),
    ):
        arm = Arm(name, Net("small"), (start, replace(start, grow=grow)))
        work = training([arm], tmp_path / name, some_data())
        assert work.run()
        state = work.store.state(segments_of(arm, 0)[1])
        assert state is not None
        after = state["filters"]["after"].float()
        assert state["curve"]["growth"]["preserving"] == exact
        if name == "writers":
            assert float(after[16:].abs().max()) == 0
        else:
            assert torch.equal(after[16:24], after[24:]) == exact
        if name == "large":
            assert float(after[16:].std() / after[:16].std()) == pytest.approx(10, rel=0.2)
