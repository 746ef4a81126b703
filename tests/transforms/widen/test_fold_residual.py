"""`residual="fold"`: one volume of a stream grows, the rest keeps its size, and the function stays."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import outgrow
from outgrow import Fold
from outgrow.errors import MethodError, SelectionError
from tests.helpers.folding import DTYPE, FRESH, build, changed, fold, images, shapes
from tests.helpers.judging import assert_learns, assert_same_function, random_states, state_of
from tests.helpers.random_weights import randomise
from tests.helpers.residual_blocks import (
    Adder,
    Bare,
    Counting,
    Features,
    Gated,
    Lucky,
    Module,
    Moody,
    MoodyModule,
    Net,
    Overwriting,
    Padded,
    PreActivated,
    Torchvision,
    Training,
)

BLOCKS: list[type[Bare]] = [Bare, Module, Torchvision, PreActivated, Gated, Padded, MoodyModule]
block = pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)


def slow_block(*quick: type[Bare]) -> pytest.MarkDecorator:
    """All kinds of blocks; those that are not named here in the exhaustive run only."""
    slow = pytest.mark.exhaustive
    cases = [pytest.param(kind, id=kind.__name__, marks=[] if kind in quick else [slow]) for kind in BLOCKS]
    return pytest.mark.parametrize("kind", cases)


@block
def test_only_the_named_volume_of_a_stream_grows(kind: type[Bare]) -> None:
    model = build(lambda: Net(kind))
    assert fold(model, "one.0.conv2") >= {"one.0.conv2", "one.0.bn2", "one.1.conv1"}
    assert model.one[0].conv2.out_channels == model.one[1].conv1.in_channels == 12
    assert model.stem.out_channels == model.one[1].conv2.out_channels == model.one[2].conv1.in_channels == 8
    folds = {path: module for path, module in model.named_modules() if isinstance(module, Fold)}
    assert [path.rpartition(".")[0] for path in folds] == ["one.0", "one.1"]
    enters, leaves = folds.values()
    assert (enters.outputs, enters.keep, enters.pairs) == (12, ((0, 0, 8),), ())
    assert (leaves.outputs, leaves.keep, leaves.pairs) == (8, ((0, 0, 8),), ((8, 10, 0, 2),))


@slow_block(Bare, PreActivated, Padded)
def test_volumes_grow_one_after_the_other_again_and_all_together(kind: type[Bare]) -> None:
    model = build(lambda: Net(kind))
    for where, by in (("one.1.conv2", 4), ("one.1.conv2", 2), ("stem", 6), ("one.0.conv2", 20), ("two.0.conv2", 2)):
        fold(model, where, by)
    assert model.one[1].conv2.out_channels == 14
    assert model.stem.out_channels == 14
    assert model.one[0].conv2.out_channels == 28
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, images(3, 0), "*", factor=1.5)
    assert "one.1.conv2" in {change.volume for change in growth.plan.changes}
    assert_same_function(old, model, FRESH)
    assert_learns(model, images(3, 3))


def test_the_last_volume_before_a_projection_needs_no_fold_behind_it() -> None:
    model = build(lambda: Net(Bare))
    assert fold(model, "one.2.conv2") == {"one.2.conv2", "one.2.bn2", "two.0.conv1", "two.0.projection"}
    assert [path for path, module in model.named_modules() if isinstance(module, Fold)] == ["one.2.fold1"]


def test_a_projection_that_is_named_stands_for_the_volume_it_joins() -> None:
    model = build(lambda: Net(Torchvision))
    assert fold(model, "two.0.projection") == {"two.0.conv2", "two.0.bn2", "two.0.projection", "two.1.conv1"}


def test_the_channels_of_a_padded_shortcut_stay_in_place() -> None:
    model = build(lambda: Net(Padded))
    fold(model, "one.2.conv2", by=2)
    assert model.two[0].fold1.keep == ((0, 0, 10), (12, 10, 2))  # zeros and x, then x_L and x_R, then zeros
    assert model.two[0].fold1.pairs == ((10, 11, 2, 1),)


def test_several_volumes_are_folded_in_one_growth() -> None:
    model = build(lambda: Net(Bare))
    fold(model, ("one.0.conv2", "one.1.conv2", "one.0.conv1"))
    assert model.one[0].conv2.out_channels == model.one[1].conv2.out_channels == 12
    assert model.one[0].conv1.out_channels == 10
    assert model.one[1].fold1.outputs == 12


def test_pairs_outnumber_the_channels_of_the_stream() -> None:
    model = build(lambda: Net(Bare))
    fold(model, "one.0.conv2", by=22)
    assert model.one[1].fold1.pairs == ((8, 19, 0, 8), (16, 27, 0, 3))


def test_features_on_the_last_axis_in_the_model_s_own_code() -> None:
    model = build(Features)
    kind, x = type(model), torch.randn(2, 4, 5, dtype=DTYPE)
    for where in ("down", "embed", "down"):
        old = copy.deepcopy(model)
        outgrow.widen(model, x, where, by=4, residual="fold")
        assert_same_function(old, model, [torch.randn(3, 7, 5, dtype=DTYPE)])
    assert (model.embed.out_features, model.down.out_features, model.down2.out_features) == (12, 16, 8)
    assert isinstance(model, kind)
    assert_learns(model, x)


@pytest.mark.parametrize("where", ["one.0.conv1", "two.1.conv1"])
def test_a_volume_without_a_skip_grows_as_usual(where: str) -> None:
    model = build(lambda: Net(Bare))
    usual = copy.deepcopy(model)
    outgrow.widen(model, images(3, 0), where, by=2, residual="fold", method="net2net")
    outgrow.widen(usual, images(3, 0), where, by=2, method="net2net")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), usual.state_dict().values(), strict=True))
    assert not any(isinstance(module, Fold) for module in model.modules())


@pytest.mark.parametrize(("name", "stem"), [("resnet18", "conv1"), ("test_resnet", "conv1.6")])
def test_blocks_of_timm(name: str, stem: str) -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=3).to(DTYPE)
    randomise(model, torch.Generator().manual_seed(0))
    model.eval()
    for writer in (stem, "layer1.0.conv2"):
        old, before = copy.deepcopy(model), shapes(model)
        outgrow.widen(model, torch.randn(2, 3, 32, 32, dtype=DTYPE), writer, by=4, residual="fold")
        assert len(changed(before, model)) < 6
        assert_same_function(old, model, [torch.randn(3, 3, 48, 48, dtype=DTYPE)])
    assert_learns(model, torch.randn(3, 3, 48, 48, dtype=DTYPE))


@slow_block(Torchvision, Gated, MoodyModule)
def test_a_folded_model_is_saved_and_loaded_into_a_fresh_small_one(kind: type[Bare], tmp_path: Path) -> None:
    model = build(lambda: Net(kind))
    for where in ("one.0.conv2", "one.0.conv2", "stem", "one.0.conv1"):
        outgrow.widen(model, images(3, 0), where, by=2, residual="fold", check=False)
    outgrow.save(model, tmp_path / "model.safetensors")
    fresh = build(lambda: Net(kind), seed=1)
    outgrow.load(fresh, tmp_path / "model.safetensors")
    assert repr(fresh) == repr(model)
    for x in FRESH:
        assert torch.equal(fresh(x), model(x))
    fold(fresh, "one.1.conv2")


def test_copies_and_pickles_of_a_folded_model_are_folded() -> None:
    model = build(lambda: Net(Bare))
    fold(model, "one.0.conv2")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert repr(twin) == repr(model)
        assert isinstance(twin.one[0], Bare)
        assert torch.equal(twin(FRESH[0]), model(FRESH[0]))
        fold(twin, "one.0.conv2")


def test_a_deep_copy_does_not_read_the_code_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(lambda: Net(Bare))
    fold(model, "one.0.conv2")
    with monkeypatch.context() as patch:
        patch.setattr(torch.fx.Tracer, "trace", None)
        twin = copy.deepcopy(copy.deepcopy(model))
    assert torch.equal(twin(FRESH[0]), model(FRESH[0]))
    with torch.no_grad():
        twin.one[0].conv2.weight.zero_()
    assert not torch.equal(twin(FRESH[0]), model(FRESH[0]))
    assert torch.equal(pickle.loads(pickle.dumps(twin))(FRESH[0]), twin(FRESH[0]))


def test_the_optimizer_and_averages_follow() -> None:
    model = build(lambda: Net(Bare)).train()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(images(4, 7)).square().mean().backward()
        optimizer.step()

    step()
    moment = optimizer.state[model.one[0].conv2.weight]["exp_avg"].clone()
    was = copy.deepcopy(average).eval()
    outgrow.widen(model, images(3, 0), "one.0.conv2", by=4, residual="fold", optimizer=optimizer, average=average)
    assert torch.equal(optimizer.state[model.one[0].conv2.weight]["exp_avg"][:8], moment)
    assert_same_function(was.module, average.module, FRESH)
    new = model.one[0].conv2.weight[8:].detach().clone()
    columns = model.one[1].conv1.weight[:, 8:].detach().clone()
    step()
    average.update_parameters(model)
    assert not torch.equal(model.one[0].conv2.weight[8:], new)
    assert not torch.equal(model.one[1].conv1.weight[:, 8:], columns)
    left, right = model.one[0].conv2.weight[8:].chunk(2)
    assert not torch.equal(left, right)  # opposite gradients make the pair differ


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Moody, "torch.fx can't read its code"),
        (Training, "one thing in training and another in evaluation"),
        (Counting, "changes attributes"),
        (Lucky, "makes tensors of its own"),
        (Overwriting, "does not run as before"),
    ],
)
def test_code_that_can_not_be_rewritten_is_refused_and_nothing_changes(kind: type[Bare], reason: str) -> None:
    model = build(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), kind(8, 8), Bare(8, 8), nn.Conv2d(8, 3, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before, states = state_of(model), random_states()
    with pytest.raises(MethodError, match=reason) as refused:
        outgrow.widen(model, images(3, 0), "1.conv2", by=2, residual="fold", optimizer=optimizer)
    assert "residual='stream'" in str(refused.value)
    assert state_of(model) == before
    assert random_states() == states


def test_a_block_that_runs_twice_ties_its_volumes_by_its_weights() -> None:
    shared = Bare(8, 8)
    model = build(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), shared, shared, nn.Conv2d(8, 3, 1)))
    fold(model, "0")
    assert shared.conv2.out_channels == model[3].in_channels == 12


def test_one_sum_for_volumes_of_two_sizes_is_refused() -> None:
    model = build(lambda: Net(Bare))
    model.add = Adder()
    for module in model.one:
        module.forward = lambda x, self=module: F.relu(model.add(x, self.branch(x)))  # type: ignore[misc]
    before = shapes(model), repr(model)
    with pytest.raises(outgrow.GrowthError, match="runs several times"):
        outgrow.widen(model, images(3, 0), "one.0.conv2", by=2, residual="fold")
    assert (shapes(model), repr(model)) == before


@pytest.mark.parametrize("method", ["mean", "random"])
def test_other_methods_are_refused(method: str) -> None:
    model = build(lambda: Net(Bare))
    before = state_of(model)
    with pytest.raises(MethodError, match="which R2R, Net2Net and NetMorph write"):
        outgrow.widen(model, images(3, 0), "one.0.conv2", by=2, residual="fold", method=method)
    assert state_of(model) == before


def test_a_glob_names_no_single_volume() -> None:
    with pytest.raises(SelectionError, match="name the modules that write them"):
        outgrow.widen(build(lambda: Net(Bare)), images(3, 0), "one.*", by=2, residual="fold")


def test_a_growth_that_fails_late_takes_the_folds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(lambda: Net(Bare))
    fold(model, "stem")
    before = state_of(model)

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sys.modules["outgrow.engine.carry_out"], "grow_optimizers", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        outgrow.widen(model, images(3, 0), "one.0.conv2", by=2, residual="fold")
    assert state_of(model) == before


def test_a_plan_with_folds_says_so_and_is_read_back_from_json() -> None:
    model = build(lambda: Net(Bare))
    plan = outgrow.widen(model, images(3, 0), "one.0.conv2", by=2, residual="fold").plan
    assert "one.0.fold1: folds the skip of one.0" in str(plan)
    assert type(plan).from_json(plan.to_json()) == plan
