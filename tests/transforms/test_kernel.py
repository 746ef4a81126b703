"""Larger kernels: the old function, checked on fresh inputs; sizes that are not possible are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import GrowthError, StaleOptimizerError
from outgrow.saving.save_load import describe
from tests.helpers.judging import assert_same_function, shake, state_of

CASES: dict[str, tuple[Any, Any, tuple[int, ...], Any]] = {
    "square": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, (2, 3, 9, 9), 7),
    "one by one": (nn.Conv2d, {"kernel_size": 1}, (2, 3, 8, 7), 3),
    "not square": (nn.Conv2d, {"kernel_size": (1, 3), "padding": (0, 2)}, (2, 3, 9, 8), (5, 3)),
    "strided": (nn.Conv2d, {"kernel_size": 3, "stride": 2}, (2, 3, 11, 9), 5),
    "dilated": (nn.Conv2d, {"kernel_size": 3, "dilation": (2, 3), "padding": 2}, (2, 3, 15, 15), 5),
    "grouped": (nn.Conv2d, {"kernel_size": 3, "groups": 3, "padding": 1}, (2, 3, 9, 9), 5),
    "same": (nn.Conv2d, {"kernel_size": 3, "padding": "same"}, (2, 3, 9, 9), 6),
    "same, even": (nn.Conv2d, {"kernel_size": 2, "padding": "same"}, (2, 3, 9, 9), (3, 5)),
    "valid": (nn.Conv2d, {"kernel_size": 2, "padding": "valid"}, (2, 3, 9, 9), 4),
    "reflecting": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, (2, 3, 9, 9), 5),
    "circular, same": (nn.Conv1d, {"kernel_size": 3, "padding": "same", "padding_mode": "circular"}, (2, 3, 9), 6),
    "line": (nn.Conv1d, {"kernel_size": 3}, (2, 3, 12), 9),
    "space": (nn.Conv3d, {"kernel_size": (1, 3, 3), "padding": 1}, (2, 3, 5, 6, 7), (3, 3, 5)),
    "transposed": (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}, (2, 3, 5, 6), 5),
    "transposed, dilated": (nn.ConvTranspose1d, {"kernel_size": 2, "dilation": 2, "stride": 3}, (2, 3, 6), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_larger_kernel_computes_the_same_and_learns(name: str) -> None:
    torch.manual_seed(0)
    kind, options, shape, size = CASES[name]
    model = shake(nn.Sequential(kind(shape[1], 6, **options), nn.Tanh()).double())
    old = copy.deepcopy(model)
    x = torch.randn(shape, dtype=torch.float64)
    growth = outgrow.kernel(model, x, "0", size=size)
    assert_same_function(old, model, [x, torch.randn(1, *shape[1:], dtype=torch.float64)])
    wanted = (size,) * (len(shape) - 2) if isinstance(size, int) else size
    assert model[0].kernel_size == wanted == tuple(model[0].weight.shape[2:])
    assert repr(model[0]) == repr(kind(shape[1], 6, **{**options, "kernel_size": wanted, "padding": model[0].padding}))
    model(x).square().sum().backward()
    assert bool((model[0].weight.grad != 0).any(dim=(0, 1)).all())
    assert growth.parameters[1] > growth.parameters[0]


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ({"kernel_size": 3}, 4, "nearest possible sizes are 3 and 5"),
        ({"kernel_size": 3}, 3, "no larger one"),
        ({"kernel_size": 3}, 1, "no larger one"),
        ({"kernel_size": 3}, (5, 5, 5), "no larger one"),
        ({"kernel_size": 3}, 5.0, "whole number"),
        ({"kernel_size": 3, "padding": "same", "dilation": 2}, 4, "can't be centred"),
        (
            {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
            25,
            "12 positions for its reflect padding, and",
        ),
        (
            {"kernel_size": (3, 1), "padding": "same", "padding_mode": "circular"},
            (3, 27),
            "13 positions for its circular",
        ),
    ],
)
def test_sizes_that_are_refused(options: dict[str, Any], size: Any, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, **options), nn.ReLU())
    before = state_of(model)
    with pytest.raises(GrowthError, match=words):
        outgrow.kernel(model, torch.randn(2, 3, 12, 12), "0", size=size)
    assert state_of(model) == before


def test_what_is_no_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    for where in ("1", "nowhere", ""):
        with pytest.raises(GrowthError, match="is no convolution of the model; those are 0"):
            outgrow.kernel(model, torch.randn(2, 3, 12, 12), where, size=5)


def test_a_standardised_kernel_is_refused() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)
            return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)

    with pytest.raises(GrowthError, match="its weight is changed before it is used"):
        outgrow.kernel(nn.Sequential(Standardised(3, 4, 3)), torch.randn(2, 3, 9, 9), "0", size=5)


def test_optimizer_and_averages_follow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 2))
    optimizer = torch.optim.Adam(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model)
    x = torch.randn(5, 3, 8, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    step()
    before = optimizer.state[model[0].weight]["exp_avg"].clone()
    averaged = average(x).detach()
    outgrow.kernel(model, x, "0", size=5, optimizer=optimizer, average=average)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(moment[:, :, 1:-1, 1:-1], before)
    assert moment.shape == (4, 3, 5, 5)
    assert torch.allclose(average(x), averaged, atol=1e-6)
    step()


def test_the_report_shows_every_axis(path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()), torch.randn(2, 1, 11, 11)
    growth = outgrow.kernel(model, x, "0", (9, 5))
    assert str(growth).splitlines()[0].split() == ["volume", "size", "method"]
    assert "3×3 → 9×5" in str(growth).splitlines()[2]
    outgrow.save(model, path)
    assert [change.row for plan in describe(path).histories[""] for change in plan.changes] == [growth.plan.changes[0].row]


def test_the_error_of_an_optimizer_that_was_left_out_shows_the_call() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()), torch.randn(2, 1, 9, 9)
    optimizer = torch.optim.Adam(model.parameters())
    for call in ("kernel", "grow", "widen"):
        model(x).sum().backward()
        optimizer.step()
        if call == "kernel":
            outgrow.kernel(model, x, "0", 5)
        elif call == "grow":
            outgrow.grow(model, x, outgrow.Kernel("0", (7, 5)), outgrow.Kernel("0", (7, 7)))
        else:
            model.append(nn.Conv2d(4, 2, 1))
            outgrow.widen(model, x, "0", by=2)
        with pytest.raises(StaleOptimizerError, match=rf"outgrow\.{call}\(model, example, …, optimizer=optimizer\)"):
            optimizer.step()
        optimizer = torch.optim.Adam(model.parameters())
