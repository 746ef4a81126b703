"""Zero initialisation: outputs are zero with dense weights that learn; impossible cases are refused and left unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError
from tests.helpers.judging import shake, state_of


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.g = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, padding=1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.g(x.mean((2, 3))))
        return nn.functional.avg_pool2d(self.b(nn.functional.gelu(self.a(x))), 2) * gate[:, :, None, None]


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.two = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(x) - self.two(x) + self.bias)


class OnePlus(nn.Module):
    """Gemma's norm: γ is stored as its difference from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.heat = nn.Linear(5, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) / self.heat


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.table.expand_as(x)


SEEDED = torch.Generator().manual_seed(0)
IMAGE, ROWS = torch.randn(4, 3, 6, 6, generator=SEEDED), torch.randn(64, 5, generator=SEEDED)
VIT = {"model_name": "vit_tiny_patch16_224", "img_size": 32}
MODULES: dict[str, tuple[Any, Tensor]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), ROWS),
    "odd": (lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)), ROWS),
    "deep": (lambda: nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3), nn.Tanh()), ROWS),
    "normed inside": (lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Sigmoid(), nn.Linear(8, 3)), ROWS),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3)), IMAGE),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 3, 1)), IMAGE),
    "single channel": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Linear(1, 3)), ROWS),
    "depthwise last": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, groups=4)), IMAGE),
    "divided": (Tempered, ROWS),
    "gated": (Gated, IMAGE),
    "summed": (Summed, ROWS),
    "attention": (lambda: timm.create_model(**VIT).blocks[0].attn, torch.randn(2, 5, 192)),
    "one head": (lambda: timm.layers.Attention(6, num_heads=1, qkv_bias=True), torch.randn(2, 5, 6)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_output_is_zero_and_learns(name: str) -> None:
    make, x = MODULES[name]
    torch.manual_seed(0)
    module = shake(make().double())
    x = x.double()
    size = module(x).abs().max()
    assert outgrow.zero_init(module, x) is module
    for training in (False, True):
        module.train(training)
        assert module(torch.cat([x, x + 1])).abs().max() < 1e-12 * size
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    dense = sum(int((weight != 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
    assert dense > 0.8
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    start = [weight.detach().clone() for weight in weights]
    for step in range(3):
        optimizer.zero_grad()
        (module(x) - 1 - step).square().sum().backward()
        optimizer.step()
    moved = sum(int((weight != old).sum()) for weight, old in zip(weights, start, strict=True))
    assert moved / sum(weight.numel() for weight in weights) > 0.95
    assert module(x).abs().max() > 1e-4


def ending_in_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))


def test_a_batch_norm_at_the_end_is_made_zero_by_its_scale_or_by_pairs_if_requested() -> None:
    x = IMAGE.double()
    for literal in (False, True):
        module = outgrow.zero_init(shake(ending_in_batch_norm().double()), x, literal=literal)
        assert bool((module[4].weight == 0).all()) != literal
        for training in (False, True):
            assert module.train(training)(x).abs().max() < 1e-11


@pytest.mark.parametrize("last", [nn.MaxPool2d(2), nn.GLU(1), nn.LeakyReLU()])
def test_pooling_and_gates_at_the_end(last: nn.Module) -> None:
    module = shake(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), last).double())
    outgrow.zero_init(module, IMAGE.double())
    assert module(IMAGE.double()).abs().max() < 1e-12
    module(IMAGE.double()).sum().backward()
    assert bool((module[2].weight.grad != 0).any())


NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4, eps=1e-5),
    "rms, one plus": OnePlus,
    "instance": lambda: nn.InstanceNorm1d(3, affine=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_of_any_kind_at_the_end_is_closed_by_its_scale(name: str) -> None:
    """Pairs before a norm are exact, but one step later the norm would amplify tiny values."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    module = shake(nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 4), NORMS[name]()).double())
    kept = module[2].weight.detach().clone()
    outgrow.zero_init(module, x)
    assert module(x).abs().max() < 1e-12
    assert torch.equal(module[2].weight, kept)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    (module(x) - 1).square().mean().backward()
    optimizer.step()
    assert 0 < module(x).abs().max() < 0.01


REFUSED: dict[str, tuple[Any, Tensor, str]] = {
    "sigmoid": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Sigmoid()), ROWS, r"aten\.sigmoid"),
    "softmax": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Softmax(-1)), ROWS, "softmax"),
    "relu": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU()), ROWS, "slope at zero is zero"),
    "one layer": (lambda: nn.Linear(5, 3), ROWS, "two layers"),
    "a skip": (lambda: nn.TransformerEncoderLayer(6, 2, 8, norm_first=True), torch.randn(2, 4, 6), "two layers"),
    "bare norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4, elementwise_affine=False)), ROWS, "norm without"),
    "bare batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
        ROWS,
        "norm without",
    ),
    "bare rms": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.RMSNorm(4, elementwise_affine=False)),
        ROWS,
        "norm without",
    ),
    "linear and table": (lambda: nn.Sequential(nn.Linear(5, 5), Tabled()), ROWS, "fixed table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_reason_and_change_nothing(name: str) -> None:
    make, x, words = REFUSED[name]
    module = make()
    before = state_of(module)
    with pytest.raises(GrowthError, match=words):
        outgrow.zero_init(module, x)
    assert state_of(module) == before
