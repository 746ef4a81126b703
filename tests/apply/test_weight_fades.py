"""Faded widenings: exact at growth, then new units fade in step by step, and no trace is left."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import outgrow
from outgrow.apply.weight_fades import drifts_of
from outgrow.errors import CheckpointError, GrowthError, MethodError, SizeError
from tests.helpers.fading import steps
from tests.helpers.judging import assert_same_function, distance, shake, state_of

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.GELU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 36, 2)).double()
    shake(model)
    return model


def values_of(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()}


def marks(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (drift.done, drift.steps) for name, drift in drifts_of(model)}


@pytest.mark.parametrize(("build", "x"), [(mlp, X), (convolutional, IMAGES)])
@pytest.mark.parametrize("method", ["auto", "random", "netmorph", outgrow.NetMorph(init="copy"), outgrow.RandomPad(init="he")])
def test_it_is_exact_at_growth_and_ends_where_random_padding_is(build: Any, x: Tensor, method: Any) -> None:
    model = build()
    old, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0)
    growth = outgrow.widen(model, x, "*", factor=1.5, method=method, fade=4, optimizer=optimizer, seed=3)
    assert growth.preserving
    assert "faded in over 4 steps" in str(growth)
    assert_same_function(old, model, [x, x[:2]])
    names, start = set(model.state_dict()), copy.deepcopy(model.state_dict())
    goals = {name: start[name].index_add(drift.axis, drift.at, drift.amount) for name, drift in drifts_of(model)}
    assert goals
    steps(model, optimizer, 2, x)
    assert set(marks(model).values()) == {(2, 4)}
    for name, goal in goals.items():
        assert (goal - start[name]).abs().max() > 1e-3
        assert distance((start[name] + goal) / 2, model.state_dict()[name]) < 1e-12
    steps(model, optimizer, 2, x)
    assert marks(model) == {}
    assert set(model.state_dict()) == names
    assert not any("outgrow_drifts" in name for module in model.modules() for name in vars(module))
    for name, goal in goals.items():
        assert distance(goal, model.state_dict()[name]) < 1e-12
        assert int((model.state_dict()[name] == 0).sum()) == 0
    assert distance(model(x).detach(), old(x).detach()) > 1e-3


def test_what_is_learned_adds_to_what_comes_in() -> None:
    model, still = mlp(), mlp()
    for one, rate in ((model, 0.1), (still, 0.0)):
        optimizer = torch.optim.SGD(one.parameters(), lr=rate)
        outgrow.widen(one, X, "0", to=8, fade=3, optimizer=optimizer)
        steps(one, optimizer, 1, X)
    gained = model[2].weight[:, 4:] - still[2].weight[:, 4:]
    assert gained.abs().max() > 1e-6
    assert torch.equal(still[2].weight[:, :4], mlp()[2].weight)


def test_only_the_optimizer_that_holds_the_columns_moves_them() -> None:
    model = mlp()
    outgrow.widen(model, X, "0", to=8, fade=3)
    steps(model, torch.optim.SGD(model[0].parameters(), lr=0.1), 1, X)
    assert marks(model) == {"2.weight": (0, 3)}
    steps(model, torch.optim.SGD(model[2].parameters(), lr=0.1), 1, X)
    assert marks(model) == {"2.weight": (1, 3)}


def test_a_stream_under_norms_takes_what_needs_no_fade() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5, depth=2).double()
    shake(model)
    old, x = copy.deepcopy(model), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    growth = outgrow.widen(model, x, "*", factor=4 / 3, fade=5, optimizer=optimizer)
    assert_same_function(old, model, [x])
    ways = {change.method for change in growth.plan.changes}
    assert "mean" in ways
    assert any("faded in" in way for way in ways)
    steps(model, optimizer, 5, x)
    assert marks(model) == {}


def test_every_kind_of_reader_can_fade_in() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.rnn = nn.Linear(3, 4), nn.LSTM(4, 6, batch_first=True)
            self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
            self.table = nn.Parameter(torch.randn(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            x, _ = self.rnn(torch.relu(self.a(x)))
            return torch.einsum("bti,io->bto", x + self.attention(x, x, x)[0], self.table)

    torch.manual_seed(0)
    model, x = Mixed().double(), torch.randn(2, 5, 3, dtype=torch.float64)
    old, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters())
    growth = outgrow.widen(model, x, "*", factor=2.0, fade=3, optimizer=optimizer)
    assert_same_function(old, model, [x])
    assert any("faded" in change.method for change in growth.plan.changes)
    assert marks(model)
    steps(model, optimizer, 3, x)
    assert marks(model) == {}


def test_a_kernel_can_fade_in() -> None:
    model = convolutional()
    old, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0)
    growth = outgrow.kernel(model, IMAGES, "0", size=(5, 7), fade=2, optimizer=optimizer)
    assert growth.preserving
    assert_same_function(old, model, [IMAGES])
    steps(model, optimizer, 2, IMAGES)
    assert marks(model) == {}
    weight = model[0].weight
    assert torch.equal(weight[:, :, 1:4, 2:5], old[0].weight)
    assert int((weight == 0).sum()) == 0


@pytest.mark.parametrize("second", ["r2r", "net2net", "netmorph", "fade", "kernel", "deepen"])
def test_another_growth_in_the_middle_is_exact_and_the_fade_goes_on(second: str) -> None:
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    outgrow.widen(model, IMAGES, "0", factor=2.0, fade=4, optimizer=optimizer)
    steps(model, optimizer, 1, IMAGES)
    old = copy.deepcopy(model)
    (_, first), *_ = drifts_of(model)
    if second == "kernel":
        outgrow.kernel(model, IMAGES, "3", size=5, optimizer=optimizer)
    elif second == "deepen":
        outgrow.deepen(model, IMAGES, "2", optimizer=optimizer)
    elif second == "fade":
        outgrow.widen(model, IMAGES, "*", factor=1.5, fade=2, optimizer=optimizer)
    else:
        outgrow.widen(model, IMAGES, "*", factor=2.0, method=second, optimizer=optimizer)
    assert_same_function(old, model, [IMAGES])
    assert (1, 4) in [(drift.done, drift.steps) for _, drift in drifts_of(model)]
    for _, drift in drifts_of(model):
        assert drift.amount.shape[drift.axis] == len(drift.at)
    if second != "net2net":
        left = sum(float(drift.amount.sum()) for _, drift in drifts_of(model) if drift.steps == 4)
        assert left == pytest.approx(float(first.amount.sum()))
    steps(model, optimizer, 3, IMAGES)
    assert marks(model) == {}


def test_a_failing_growth_leaves_fades_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    outgrow.widen(model, X, "0", to=8, fade=4)
    before, drifts = state_of(model), [drift for _, drift in drifts_of(model)]
    monkeypatch.setattr(outgrow.verify.outputs, "check", lambda *given: (_ for _ in ()).throw(RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        outgrow.widen(model, X, "*", factor=2.0, fade=3)
    assert state_of(model) == before
    assert [drift for _, drift in drifts_of(model)] == drifts


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_a_copy_goes_its_own_way_to_the_same_end(how: str, tmp_path: Path) -> None:
    model = convolutional()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    outgrow.widen(model, IMAGES, "*", factor=1.5, fade=5, optimizer=optimizer)
    steps(model, optimizer, 2, IMAGES)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        outgrow.save(model, tmp_path / "model.safetensors")
        twin = outgrow.load(convolutional(), tmp_path / "model.safetensors")
    assert marks(twin) == marks(model) != {}
    assert values_of(twin) == values_of(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(4):
        steps(model, optimizer, 1, IMAGES)
        steps(twin, other, 1, IMAGES)
        assert values_of(twin) == values_of(model)
    assert marks(twin) == marks(model) == {}


def test_a_damaged_fade_in_a_file_is_refused(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model, path = mlp(), tmp_path / "model.safetensors"
    outgrow.widen(model, X, "0", to=8, fade=4)
    outgrow.save(model, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["outgrow.fade/0"] = tensors["outgrow.fade/0"][:, :1].contiguous()
    save_file(tensors, path, metadata)
    fresh = mlp()
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match="the fade of"):
        outgrow.load(fresh, path, checksums=False)
    assert state_of(fresh) == before
    assert marks(fresh) == {}


def test_small_steps_are_not_lost_in_low_precision() -> None:
    model = mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    outgrow.widen(model, X.to(torch.bfloat16), "0", to=8, fade=1000, optimizer=optimizer)
    (_, drift), *_ = drifts_of(model)
    for _ in range(1000):
        drift.advance()
    assert torch.equal(model[2].weight[:, 4:], drift.amount)


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SizeError, match="fade=0"):
        outgrow.Widen("*", factor=2.0, fade=0)
    with pytest.raises(SizeError, match=r"fade=1\.5"):
        outgrow.Kernel("conv", 5, fade=1.5)  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="exact without a fade"):
        outgrow.widen(mlp(), X, "0", to=8, method="r2r", fade=3)
    with pytest.raises(GrowthError, match="fold"):
        outgrow.Widen("stem", by=2, residual="fold", fade=3)


def test_drifts_of_one_tensor_come_in_the_order_in_which_they_began() -> None:
    from outgrow.modules.gates import CLOCK

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for _ in range(20):
        outgrow.widen(model, x, "0", by=2, fade=50)
    mine = [drift for _, drift in drifts_of(model)]
    assert len(mine) == 20
    assert [drift for drift in CLOCK.moving if any(drift is one for one in mine)] == mine
