"""Every kind of layer, alone between a stem and a head: it grows exactly, or is refused for the reason that applies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outgrow
from tests.helpers import layer_blocks as b
from tests.helpers.judging import assert_learns, assert_same_function, random_states, state_of
from tests.helpers.random_weights import DTYPE, randomise

W = 6  # the stem's width


class Between(nn.Module):
    """A stem, the layer in question, and a head."""

    def __init__(self, stem: nn.Module, layer: nn.Module, head: nn.Module, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.layer, self.head, self.gather = stem, layer, head, gather

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gather(self.layer(self.stem(x))))


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def same(x: Tensor) -> Tensor:
    return x


def places(x: Tensor) -> Tensor:
    return x.mean((2, 3))


def image(layer: nn.Module, out: int = W) -> nn.Module:
    return Between(nn.Conv2d(3, W, 3, padding=1), layer, nn.Linear(out, 4), places)


def upscaled(layer: nn.Module, out: int) -> nn.Module:
    """The layer after a pixel shuffle, which turns three quarters of the channels into pixels."""
    return image(nn.Sequential(nn.Conv2d(W, 8, 1), nn.PixelShuffle(2), layer), out)


def sequence(layer: nn.Module, out: int = W) -> nn.Module:
    return Between(nn.Linear(5, W), layer, nn.Linear(out, 4), same)


def tokens(layer: nn.Module, out: int = W) -> nn.Module:
    return Between(nn.Embedding(11, W), layer, nn.Linear(out, 4), same)


def tied(layer: nn.Module) -> nn.Module:
    model = Between(nn.Embedding(11, W), layer, nn.Linear(W, 11, bias=False), same)
    model.head.weight = model.stem.weight
    return model


class Over(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class RootMeanSquare(nn.Module):
    """RMSNorm with ε as a literal in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.weight


class NormedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.linear(self.norm(x)))


class Projected(nn.Module):
    """An LSTM of 5 cells whose outputs are projected to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(W, 5, num_layers=2, proj_size=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Waves(nn.Module):
    """Fourier features with learned frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(W, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ self.weight), torch.cos(x @ self.weight)], -1)


class Unpooled(nn.Module):
    """Maxima, put back to their places, as in SegNet."""

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.pool, self.between, self.unpool = nn.MaxPool2d(2, return_indices=True), between or nn.Tanh(), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        maxima, places = self.pool(x)
        return self.unpool(self.between(maxima), places)


class Prototypes(nn.Module):
    """The cosine similarity to each of 5 prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, W))

    def forward(self, x: Tensor) -> Tensor:
        return F.cosine_similarity(x.unsqueeze(-2), self.weight, dim=-1)


class NormBesideScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(W), b.LayerScale(W, image=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.norm(x), self.scale(x)], dim=-1)


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    where: str = "stem"
    by: int = 4
    refused: str = ""  # a word of the reason; empty: it grows
    method: str = "auto"


def attention(how: str, end: str, fused: bool = False, heads: int = 2, depth: int = 4) -> Callable[[], nn.Module]:
    return lambda: sequence(b.Attention(W, heads, depth, how, end, fused, bias=True))


def queries(how: str) -> Callable[[], nn.Module]:
    return lambda: sequence(b.GroupedQueryAttention(W, 2, 3, 4, how))


def residual(body: nn.Module, out: int, project: bool = False) -> nn.Module:
    body.out = out
    return image(b.Residual(body, nn.Conv2d(W, out, 1) if project else None, nn.ReLU(), 1), out)


def cell(kind: str, layers: int = 1, both_ways: bool = False) -> Callable[[], nn.Module]:
    return lambda: sequence(b.Recurrent(W, 3, kind, layers, both_ways), 3 * (1 + both_ways))


CASES = [
    Case("linear", lambda: sequence(nn.Linear(W, 5), 5)),
    Case("linear's own units", lambda: sequence(nn.Linear(W, 5), 5), "layer"),
    Case("convolution", lambda: image(nn.Conv2d(W, 5, 3, padding=1), 5), "layer"),
    Case("convolution without bias", lambda: image(nn.Conv2d(W, 5, 1, bias=False), 5)),
    Case("grouped convolution", lambda: image(nn.Conv2d(W, 8, 3, groups=2), 8), by=6),
    Case("grouped convolution's own units", lambda: image(nn.Conv2d(W, 8, 3, groups=2), 8), "layer"),
    Case("depthwise convolution", lambda: image(nn.Conv2d(W, W, 3, groups=W))),
    Case("depthwise convolution, two each", lambda: image(nn.Conv2d(W, 2 * W, 3, groups=W), 2 * W)),
    Case("one-dimensional convolution", lambda: sequence(b.ChannelsFirst(nn.Conv1d(W, 5, 3), 5), 5)),
    Case("three-dimensional convolution", lambda: image(b.Volumetric(nn.Conv3d(W, 5, 3, padding=1), 5), 5)),
    Case("transposed convolution", lambda: image(nn.ConvTranspose2d(W, 5, 2, 2), 5)),
    Case("transposed convolution's own units", lambda: image(nn.ConvTranspose2d(W, 5, 2, 2), 5), "layer"),
    Case("transposed grouped convolution", lambda: image(nn.ConvTranspose2d(W, 4, 2, 2, groups=2), 4), by=6),
    Case("transposed one-dimensional", lambda: sequence(b.ChannelsFirst(nn.ConvTranspose1d(W, 5, 3), 5), 5)),
    Case("embedding", lambda: tokens(nn.ReLU())),
    Case("embedding's rows", lambda: tokens(nn.ReLU()), "stem#2", refused="looked up"),
    Case("batch norm", lambda: image(nn.BatchNorm2d(W))),
    Case("batch norm without parameters", lambda: image(nn.BatchNorm2d(W, affine=False))),
    Case("batch norm without statistics", lambda: image(nn.BatchNorm2d(W, track_running_stats=False))),
    Case("batch norm of a sequence", lambda: sequence(b.ChannelsFirst(nn.BatchNorm1d(W), W))),
    Case("instance norm", lambda: image(nn.Sequential(nn.InstanceNorm2d(W), nn.GELU()))),
    Case("instance norm with parameters", lambda: image(nn.Sequential(nn.InstanceNorm2d(W, affine=True), nn.GELU()))),
    Case(
        "instance norm with statistics", lambda: image(nn.Sequential(nn.InstanceNorm2d(W, track_running_stats=True), nn.GELU()))
    ),
    Case("group norm", lambda: image(nn.GroupNorm(2, W)), by=6),
    Case("group norm without parameters", lambda: image(nn.GroupNorm(2, W, affine=False)), by=6),
    Case("group norm of one group", lambda: image(nn.GroupNorm(1, W)), by=6),
    Case("group norm of one group, not doubled", lambda: image(nn.GroupNorm(1, W)), refused="whole copies"),
    Case("layer norm", lambda: sequence(nn.LayerNorm(W))),
    Case("layer norm by one", lambda: sequence(nn.LayerNorm(W)), by=1),
    Case("layer norm in an image", lambda: image(b.ChannelsLast(nn.LayerNorm(W), W))),
    Case("layer norm by pairs", lambda: sequence(nn.LayerNorm(W)), refused="statistics", method="r2r"),
    Case("layer norm written with var", lambda: sequence(b.WrittenLayerNorm(W, 1e-3, "var"))),
    Case("layer norm written with pow", lambda: sequence(b.WrittenLayerNorm(W, 1e-3, "pow"))),
    Case("layer norm written over channels", lambda: image(b.WrittenLayerNorm2d(W, 1e-3))),
    Case("one layer norm used twice", lambda: sequence(NormedTwice())),
    Case("copies under a layer norm", lambda: sequence(nn.LayerNorm(W)), by=W, method="net2net"),
    Case("layer norm beside a scale", lambda: sequence(NormBesideScale(), 2 * W)),
    Case("RMS norm", lambda: sequence(nn.RMSNorm(W, eps=1e-3))),
    Case("RMS norm written out", lambda: sequence(b.WrittenRMSNorm(W, 1e-3))),
    Case("RMS norm with a number for ε", lambda: sequence(RootMeanSquare())),  # its writers pay
    Case("one slope", lambda: image(nn.PReLU())),
    Case("a slope each", lambda: image(nn.PReLU(W))),
    Case("layer scale", lambda: image(b.LayerScale(W, image=True))),
    Case("layer scale before a layer norm", lambda: sequence(nn.Sequential(b.LayerScale(W, image=False), nn.LayerNorm(W)))),
    Case("squeeze and excite", lambda: image(b.SqueezeExcite(W, 3, "linear"))),
    Case("squeeze and excite with convolutions", lambda: image(b.SqueezeExcite(W, 3, "hard"))),
    Case("squeeze and excite, hidden units", lambda: image(b.SqueezeExcite(W, 3, "conv")), "layer.fc1"),
    Case("concatenation", lambda: image(b.Concatenate([b.keep(nn.Conv2d(W, 4, 1), 4)], W, 1, True), W + 4)),
    Case(
        "concatenation, first",
        lambda: image(b.Concatenate([b.keep(nn.Conv2d(W, 4, 1), 4)], W, 1, True), W + 4),
        "layer.branches.0",
    ),
    Case("concatenation with itself", lambda: image(Over(lambda x: torch.cat([x, x.tanh()], 1)), 2 * W)),
    Case("halves", lambda: image(b.Halves(b.keep(nn.Conv2d(3, 4, 1), 4), W, 1, "chunk"), 7), "layer.inner"),
    Case("gated linear unit", lambda: sequence(b.Gated(nn.Linear(W, 8), 4, -1, "glu"), 4), "layer.project"),
    Case("gated by a chunk", lambda: sequence(b.Gated(nn.Linear(W, 8), 4, -1, "chunk"), 4), "layer.project"),
    Case("gated by two layers", lambda: sequence(b.Gate(W, 5, W)), "layer.gate"),
    Case("flattened", lambda: Between(nn.Conv2d(3, W, 3), nn.ReLU(), nn.Linear(W * 16, 4), flat)),
    Case("pixel shuffle", lambda: image(nn.Sequential(nn.Conv2d(W, 8, 1), nn.PixelShuffle(2)), 2), "layer.0"),
    Case("pixel shuffle, convolved", lambda: upscaled(nn.Conv2d(2, 5, 3, padding=1), 5), "layer.0"),
    Case("pixel shuffle, convolved by unit", lambda: upscaled(nn.Conv2d(2, 4, 3, padding=1, groups=2), 4), "layer.0"),
    Case("pixel shuffle, transposed convolution", lambda: upscaled(nn.ConvTranspose2d(2, 5, 2), 5), "layer.0"),
    Case("pixel shuffle, windows", lambda: upscaled(Over(lambda x: F.unfold(x, 2, stride=2)[..., None]), 8), "layer.0"),
    Case("pixel shuffle, some rows", lambda: upscaled(Over(lambda x: x.index_select(2, torch.tensor([0, 2]))), 2), "layer.0"),
    Case("pixel shuffle, sliding", lambda: upscaled(Over(lambda x: x.unfold(2, 3, 1).mean(-1)), 2), "layer.0"),
    Case("pixel shuffle, pooled", lambda: upscaled(nn.MaxPool2d(2), 2), "layer.0"),
    Case("pixel shuffle, padded", lambda: upscaled(Over(lambda x: F.pad(x, (1, 1, 0, 1))), 2), "layer.0"),
    Case("pixel shuffle, ranked", lambda: upscaled(Over(lambda x: x.topk(2, 2).values), 2), "layer.0"),
    Case("pixel shuffle, spectrum", lambda: upscaled(Over(lambda x: torch.fft.rfft2(x).real), 2), "layer.0"),
    Case(
        "pixel shuffle, rows added",
        lambda: upscaled(Over(lambda x: torch.zeros_like(x).index_add(2, torch.arange(x.shape[2]) // 2, x)), 2),
        "layer.0",
    ),
    Case("pixel unshuffle", lambda: image(nn.PixelUnshuffle(2), 4 * W)),
    Case("max pooling", lambda: image(nn.MaxPool2d(2))),
    Case("average pooling", lambda: image(nn.AvgPool2d(2))),
    Case("adaptive pooling", lambda: image(nn.AdaptiveAvgPool2d(2))),
    Case("adaptive max pooling", lambda: image(nn.AdaptiveMaxPool2d(2))),
    Case("nearest interpolation", lambda: image(b.Resize("nearest", W))),
    Case("bilinear interpolation", lambda: image(b.Resize("bilinear", W))),
    Case("residual", lambda: residual(nn.Conv2d(W, W, 3, padding=1), W)),
    Case("residual, projected", lambda: residual(nn.Conv2d(W, 8, 3, padding=1), 8, project=True), "layer.body"),
    Case("residual, stem of a projection", lambda: residual(nn.Conv2d(W, 8, 3, padding=1), 8, project=True)),
    Case("attention, heads of a fused qkv", attention("qkv", "rest"), "layer.qkv", by=2),
    Case("attention, heads of a chunked qkv", attention("qkv_chunk", "flatten"), "layer.qkv", by=2),
    Case("attention, heads of separate layers", attention("separate", "rest", fused=True), "layer.q_proj", by=2),
    Case("attention, stem", attention("qkv", "rest", fused=True)),
    Case(
        "attention that ends in its input's shape",
        attention("qkv", "same", heads=2, depth=3),
        "layer.qkv",
        by=2,
        refused="layer",
    ),
    Case("torch's attention, stem alone", lambda: sequence(b.SelfAttention(W, 2)), refused="layer.attention"),
    Case("grouped queries, interleaved", queries("interleave"), "layer.q_proj#2", by=4),
    Case("grouped queries, expanded", queries("expand"), "layer.q_proj#2", by=4),
    Case("whole groups of queries, interleaved", queries("interleave"), "layer.q_proj", by=6),
    Case("whole groups of queries, expanded", queries("expand"), "layer.q_proj", by=6),
    Case("LSTM, its inputs", cell("lstm")),
    Case("GRU, its inputs", cell("gru")),
    Case("LSTM of two layers, both ways", cell("lstm", 2, True)),
    Case("LSTM with projections, its inputs", lambda: sequence(Projected(), 3)),
    Case("LSTM with projections, its projections", lambda: sequence(Projected(), 3), "layer.lstm"),
    Case("LSTM with projections, its cells", lambda: sequence(Projected(), 3), "layer.lstm#2"),
    Case("one layer used twice", lambda: image(b.Twice(nn.Conv2d(W, W, 1), nn.ReLU(), W)), by=4),
    Case("one layer used twice, by pairs", lambda: image(b.Twice(nn.Conv2d(W, W, 1), nn.ReLU(), W)), method="r2r"),
    Case("tied embedding under a layer norm", lambda: tied(nn.LayerNorm(W))),
    Case("tied embedding by pairs", lambda: tied(nn.Tanh()), refused="tied", method="r2r"),
    Case("sine", lambda: sequence(Over(lambda x: torch.sin(3 * x)))),
    Case("learned frequencies", lambda: sequence(Waves(), 2 * 5), "layer"),
    Case("random slopes", lambda: image(nn.RReLU())),
    Case("pooling undone", lambda: image(Unpooled())),
    Case("pooling undone, on other values", lambda: image(Unpooled(nn.Conv2d(W, W, 1)))),
    Case("local response norm", lambda: image(nn.LocalResponseNorm(3)), refused="pools or resamples"),
    Case("cosine to prototypes, by prototype", lambda: sequence(Prototypes(), 5), "layer"),
    Case("cosine to prototypes, by feature", lambda: sequence(Prototypes(), 5), refused="runs over its units"),
    Case("dropout", lambda: image(nn.Sequential(nn.Dropout2d(0.3), nn.Dropout(0.2)))),
    Case("softmax over the units", lambda: sequence(nn.Softmax(-1)), refused="softmax"),
    Case("ranked units", lambda: sequence(Over(lambda x: x.sort(-1).values)), refused="ranks"),
    Case("rolled units", lambda: sequence(Over(lambda x: x.roll(1, -1))), refused="reorders its units"),
    Case("the model's output", lambda: sequence(nn.ReLU()), "head", refused="output"),
    *(Case(f"activation {name}", lambda name=name: image(b.ACTIVATIONS[name]())) for name in b.ACTIVATIONS),
]


def example(model: nn.Module, batch: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    match model.stem:
        case nn.Conv2d():
            return torch.randn(batch, 3, 6, 6, generator=generator, dtype=DTYPE)
        case nn.Linear():
            return torch.randn(batch, 7, 5, generator=generator, dtype=DTYPE)
    return torch.randint(11, (batch, 7), generator=generator)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer(case: Case) -> None:
    model = case.model().to(DTYPE).eval()
    randomise(model, torch.Generator().manual_seed(7))
    old, before, dice = copy.deepcopy(model), state_of(model), random_states()
    volume = next(v for v in outgrow.volumes(model, example(model, 3, 0)) if v.name == case.where)
    if case.refused:
        with pytest.raises(outgrow.GrowthError, match=case.refused):
            outgrow.widen(model, example(model, 3, 0), case.where, by=case.by, method=case.method)
        assert state_of(model) == before
        assert random_states() == dice
        return
    growth = outgrow.widen(model, example(model, 3, 0), case.where, by=case.by, method=case.method)
    (change,) = (change for change in growth.plan.changes if change.volume == case.where)
    assert (change.old, change.new) == (volume.size, volume.size + case.by)
    assert growth.parameters[1] > growth.parameters[0]
    assert random_states() == dice
    assert_same_function(old, model, [example(model, 4, 1), example(model, 1 if "batch" not in case.name else 2, 2)])
    assert_learns(model, example(model, 4, 3))


def test_shared_slope_is_not_grown() -> None:
    model = image(nn.PReLU()).to(DTYPE).eval()
    outgrow.widen(model, example(model, 3, 0), "stem", by=2)
    assert model.layer.weight.shape == (1,)


def test_sizes_that_modules_print_follow() -> None:
    model = image(nn.Sequential(nn.Conv2d(W, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.PReLU(8)), 8).to(DTYPE).eval()
    outgrow.widen(model, example(model, 3, 0), "layer.0", by=8)
    convolution, norm, slope = model.layer
    assert (convolution.out_channels, norm.num_channels, slope.num_parameters, model.head.in_features) == (16, 16, 16, 16)
    assert F.conv2d(torch.zeros(1, W, 6, 6, dtype=DTYPE), convolution.weight, groups=convolution.groups).shape[1] == 16


def test_groups_are_counted_in_channels_and_heads_one_by_one() -> None:
    grouped = image(nn.Sequential(nn.Conv2d(W, 12, 1), nn.GroupNorm(3, 12)), 12).to(DTYPE).eval()
    sizes = {volume.name: volume.size for volume in outgrow.volumes(grouped, example(grouped, 2, 0))}
    assert sizes["layer.0"] == 12
    with pytest.raises(outgrow.GrowthError, match="from 12 to 14 by r2r: it adds 8 at a time; the nearest possible size is 20"):
        outgrow.widen(grouped, example(grouped, 2, 0), "layer.0", to=14, method="r2r")
    outgrow.widen(grouped, example(grouped, 2, 0), "layer.0", to=16)
    assert (grouped.layer[1].num_groups, grouped.layer[1].num_channels) == (4, 16)


def test_auto_reaches_an_odd_size_by_another_exact_method() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DTYPE)
    growth = outgrow.widen(model, torch.randn(2, 3, dtype=DTYPE), "0", to=7)
    assert (model[0].out_features, growth.plan.changes[0].method) == (7, "netmorph")


@pytest.mark.parametrize("by", [1, 2, 3])
def test_an_rms_norm_in_single_precision_moves_its_epsilon(by: int) -> None:
    """Kernels round ε to the type in which they compute."""
    model = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4, eps=1e-5), nn.Linear(4, 2))
    randomise(model, torch.Generator().manual_seed(7))
    old = copy.deepcopy(model)
    outgrow.widen(model, torch.randn(5, 3), "0", by=by)
    assert model[1].eps == pytest.approx(1e-5 * 4 / (4 + by))
    assert_same_function(old, model, [torch.randn(6, 3)])
