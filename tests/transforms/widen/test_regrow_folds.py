"""`residual="fold"` by NetMorph and Net2Net: exact, again and again, and in files."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow import Fold, Method
from tests.helpers.folding import FRESH, build, fold, images
from tests.helpers.judging import assert_same_function
from tests.helpers.residual_blocks import Bare, Features, Module, Net, Padded, PreActivated, Torchvision

METHODS: dict[str, str | Method] = {
    "netmorph": "netmorph",
    "zero writers": outgrow.NetMorph(zero="writers"),
    "net2net": "net2net",
    "random split": outgrow.Net2Net(split="random", mapping="random"),
}
KINDS: list[type[Bare]] = [Bare, Module, Torchvision, PreActivated, Padded]
by_method = pytest.mark.parametrize("name", METHODS)


def folds(model: nn.Module) -> list[Fold]:
    return [module for module in model.modules() if isinstance(module, Fold)]


@by_method
@pytest.mark.parametrize(
    "kind",
    [Torchvision, *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS if kind is not Torchvision)],
    ids=lambda kind: kind.__name__,
)
def test_only_the_named_volume_grows_and_the_function_stays(name: str, kind: type[Bare]) -> None:
    model = build(lambda: Net(kind))
    fold(model, "one.0.conv2", by=3, method=METHODS[name])
    assert model.one[0].conv2.out_channels == model.one[1].conv1.in_channels == 11
    assert model.stem.out_channels == model.one[1].conv2.out_channels == 8
    fold(model, "one.0.conv2", by=9, method=METHODS[name])
    fold(model, "stem", by=5, method=METHODS[name])


def test_what_each_method_leaves_on_the_skip() -> None:
    found = {}
    for name, method in METHODS.items():
        model = build(lambda: Net(Bare))
        fold(model, "one.0.conv2", by=2, method=method)
        found[name] = folds(model)
    enters, leaves = found["netmorph"]
    assert (enters.outputs, enters.keep, leaves.keep, leaves.pairs, leaves.shared) == (10, ((0, 0, 8),), ((0, 0, 8),), (), ())
    assert found["zero writers"][1].keep == ((0, 0, 8), (8, 0, 2))
    enters, leaves = found["net2net"]
    assert enters.keep == ((0, 0, 8), (0, 8, 2))  # the result is copied
    assert leaves.keep == ((2, 2, 6),)
    assert leaves.shared == ((0, 0, 0.5, 2), (8, 0, 0.5, 2))
    (_, _, one, _), (_, _, other, _) = found["random split"][1].shared
    assert one + other == pytest.approx(1)
    assert one != other


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 10))])
def test_methods_in_any_order_stay_exact_in_memory_and_in_files(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    kind, x = draw.choice(KINDS), images(3, 0)
    model = build(lambda: Net(kind))
    old = copy.deepcopy(model)
    for _ in range(4):
        where = draw.choice(["stem", "one.0.conv2", "one.1.conv2", "two.0.conv2"])
        method = draw.choice(["r2r", *METHODS.values()])
        residual = draw.choice(["fold", "fold", "stream"])
        before = copy.deepcopy(model)
        if residual == "stream":
            where = next(volume.name for volume in outgrow.volumes(model, x) if where in volume.writers)
        outgrow.widen(model, x, where, by=draw.choice([2, 4, 10]), method=method, residual=residual)
        assert_same_function(before, model, FRESH)
    assert_same_function(old, model, FRESH)
    outgrow.save(model, tmp_path / "model.safetensors")
    fresh = build(lambda: Net(kind), seed=1)
    outgrow.load(fresh, tmp_path / "model.safetensors")
    assert repr(fresh) == repr(model)
    assert torch.equal(fresh(FRESH[0]), model(FRESH[0]))


def test_auto_takes_netmorph_for_an_odd_number_of_units() -> None:
    model = build(lambda: Net(Bare))
    assert outgrow.widen(model, images(3, 0), "one.0.conv2", by=4, residual="fold").plan.changes[0].method == "r2r"
    assert outgrow.widen(model, images(3, 0), "one.1.conv2", by=3, residual="fold").plan.changes[0].method == "netmorph"


@by_method
def test_features_on_the_last_axis(name: str) -> None:
    model = build(Features)
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    for where in ("down", "embed", "down"):
        old = copy.deepcopy(model)
        outgrow.widen(model, x, where, by=4, residual="fold", method=METHODS[name])
        assert_same_function(old, model, [torch.randn(3, 7, 5, dtype=torch.float64)])


class Plain(nn.Module):
    """A ReLU behind the stem's values, which also go to a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.up, self.down, self.head = nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.down(torch.tanh(self.up(torch.relu(x)))))


def test_zero_writers_learn_through_the_skip() -> None:
    """Layers behind a ReLU give zeros no gradient, and the skip does."""
    model, x = build(Plain), torch.randn(7, 5, dtype=torch.float64)
    method = outgrow.NetMorph(zero="writers")
    growth = outgrow.widen(model, x, "stem", by=2, residual="fold", method=method)
    model(x).square().mean().backward()
    assert bool((model.stem.weight.grad[4:] != 0).all())
    assert not growth.plan.changes[0].note


def test_a_copy_s_gradient_is_its_part_of_the_unit_s() -> None:
    """The skip shares a unit in the same parts as the layers that read it, as optimizer state assumes."""
    model = build(lambda: Net(Bare))
    old = copy.deepcopy(model)
    outgrow.widen(model, images(3, 0), "one.0.conv2", by=8, residual="fold", method=outgrow.Net2Net(split="random"))
    for one in (old, model):
        one(FRESH[0]).square().sum().backward()
    (_, _, kept, _), (_, _, given, _) = folds(model)[1].shared
    before, after = old.one[0].conv2.weight.grad, model.one[0].conv2.weight.grad
    slack = 1e-12 * float(before.abs().max())
    assert torch.allclose(after[:8], kept * before, rtol=1e-8, atol=slack)
    assert torch.allclose(after[8:], given * before, rtol=1e-8, atol=slack)
