"""Models that an analysis could misjudge: hidden outputs, noise, shared memory, sizes that only seem tied."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.errors import GrowthError, MethodError, TraceError, VerifyError
from tests.helpers.judging import assert_same_function, distance, shake

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Headed(nn.Module):
    """Returns its scores inside an object."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.body, self.head, self.wrap = nn.Linear(5, 8), nn.Linear(8, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.head(torch.relu(self.body(x))))


class Own:
    def __init__(self, scores: Tensor) -> None:
        self.inside = {"scores": [scores]}


WRAPS = {
    "namespace": (lambda y: SimpleNamespace(y=y), lambda out: out.y),
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0, validate_args=False), lambda out: out.loc),
    "object": (Own, lambda out: out.inside["scores"][0]),
    "beside": (lambda y: (y.sum(), SimpleNamespace(y=y)), lambda out: out[1].y),
    "complex": (torch.fft.fft, torch.view_as_real),
}


@pytest.mark.parametrize("name", WRAPS)
def test_outputs_are_found_in_any_object(name: str) -> None:
    wrap, find = WRAPS[name]
    model = shake(Headed(wrap).double())
    before = find(model(X)).detach()
    growth = outgrow.widen(model, X, factor=2)
    assert [change.volume for change in growth.plan.changes] == ["body"]
    assert distance(before, find(model(X)).detach()) < 1e-13
    assert growth.max_error < 1e-13


def test_outputs_that_nothing_can_see_are_not_called_checked() -> None:
    model = shake(Headed(lambda y: y.detach().numpy()).double())
    before = model(X)
    with pytest.raises(VerifyError, match="no values to compare"):
        outgrow.widen(model, X, factor=2)
    outgrow.widen(model, X, factor=2, check=False)
    assert np.allclose(before, model(X), rtol=1e-12)


def test_an_example_without_a_sample_checks_nothing() -> None:
    with pytest.raises(VerifyError, match="no values to compare"):
        outgrow.widen(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(0, 5), factor=2)


class Coder(nn.Module):
    """A variational autoencoder: it draws a random value for every unit of its code in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.decode, self.out = nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.encode(x))
        code = self.mean(h)
        if self.training:
            code = code + torch.randn_like(code) * torch.exp(0.5 * self.spread(h))
        return self.out(torch.relu(self.decode(code)))


def test_noise_at_units_keeps_its_spread() -> None:
    torch.manual_seed(0)
    model = Coder()
    many = torch.randn(1, 5).expand(40_000, 5)
    before = model(many).var(0)
    growth = outgrow.widen(model, torch.randn(4, 5), factor=2)
    assert {"encode", "decode"} <= {change.volume for change in growth.plan.changes}
    assert (model(many).var(0) / before - 1).abs().max() < 0.05


def test_tensors_that_share_memory_are_refused_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).bfloat16()
    model[2].weight.data = model[0].weight.data
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TraceError, match=r"2\.weight: it shares memory with 0\.weight"):
        outgrow.widen(model, torch.randn(4, 8).bfloat16(), "0", factor=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_views_into_one_memory_that_do_not_overlap_are_fine() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    old = copy.deepcopy(model)
    outgrow.widen(model, X, factor=2)
    assert_same_function(old, model, [X])


class DistributedDataParallel(nn.Module):
    """A substitute for torch's, which needs processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def test_a_model_wrapped_for_several_processes_is_refused() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(TraceError, match=r"grow the module inside it \(model\.module\)"):
        outgrow.widen(model, X.float(), factor=2)


def test_inference_mode_is_refused_with_the_way_out() -> None:
    with torch.inference_mode(), pytest.raises(TraceError, match=r"outside torch\.inference_mode"):
        outgrow.widen(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(2, 5), factor=2)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.hh, self.o = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], self.hh.out_features, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = torch.tanh(self.i(x[:, t]) + self.hh(h))
        return self.o(h)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.r, self.o = kind(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.r(x)[0][:, -1])


@pytest.mark.parametrize("make", [Looped, lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU)], ids=["loop", "LSTM", "GRU"])
def test_gradients_of_recurrent_copies_are_carried_as_they_are(make: Any) -> None:
    model = shake(make().double())
    x, y = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
    (model(x) - y).square().mean().backward()
    outgrow.widen(model, x, factor=2, method="net2net")
    carried = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, carried[name]) < 1e-9, name


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(torch.relu(self.a(x)), 0.5, self.training))


def test_dropout_that_is_no_module_is_reported() -> None:
    growth = outgrow.widen(Dropping().double(), X, factor=2)
    assert growth.stochastic
    assert "dropout is active" in str(growth)


class Attending(nn.Module):
    """One module that does everything: attention over three heads, and a hidden layer that nothing ties to them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 3
        self.i, self.n, self.out = nn.Linear(5, 12), nn.LayerNorm(12), nn.Linear(12, 2)
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.f1, self.f2 = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.i(x)
        y, (b, n, c) = self.n(x), x.shape
        q, k, v = (layer(y).view(b, n, self.h, c // self.h).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2) / (c // self.h) ** 0.5).softmax(-1)
        x = x + self.o((scores @ v).transpose(1, 2).reshape(b, n, c))
        x = x + self.f2(torch.relu(self.f1(self.n(x))))
        return self.out(x.mean(1))


def test_sizes_that_the_code_does_not_tie_are_grown_by_their_own_factor() -> None:
    model = shake(Attending().double())
    old = copy.deepcopy(model)
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    growth = outgrow.widen(model, x, factor=1.5)
    assert {c.volume: c.new for c in growth.plan.changes} == {"i": 20, "q": 5, "f1": 30}
    assert_same_function(old, model, [x, x[:1, :3]])


class Adapted(nn.Module):
    """A low-rank adapter scaled by its rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.rank = layer, 2
        self.a, self.b = nn.Parameter(torch.randn(2, layer.in_features)), nn.Parameter(torch.randn(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + (x @ self.a.t()) @ self.b.t() * (1 / self.rank)


def test_only_what_is_to_blame_is_left_out() -> None:
    model = shake(nn.Sequential(Adapted(nn.Linear(5, 8)), nn.ReLU(), Adapted(nn.Linear(8, 3))).double())
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, X, factor=2)
    assert [change.volume for change in growth.plan.changes] == ["0.layer"]
    assert any("uses 0.25 where 0.5 should be" in skip.reason for skip in growth.skipped)
    assert_same_function(old, model, [X])


class Marked(nn.Module):
    """NaN marks missing values; `tied`: only as long as the layer has its first size."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.o, self.tied = nn.Linear(5, 8), nn.Linear(8, 3), tied

    def forward(self, x: Tensor) -> Tensor:
        mark = torch.nan if self.a.out_features == 8 or not self.tied else 1.0
        seen = x[:, :1] < 0
        hidden = torch.relu(self.a(x)).masked_fill(~seen, mark)
        return self.o(hidden.nan_to_num(0.0)) + torch.full((len(x), 1), mark, dtype=x.dtype).nan_to_num(2.0)


def test_a_nan_that_the_code_computes_with_is_the_same_nan_afterwards() -> None:
    model = shake(Marked().double())
    old = copy.deepcopy(model)
    assert {True, False} == set((X[:, 0] < 0).tolist())
    assert outgrow.widen(model, X, "a", to=12).plan.changes[0].new == 12
    assert_same_function(old, model, [X])
    with pytest.raises(MethodError, match="uses 1 where nan should be"):
        outgrow.widen(Marked(tied=True).double(), X, "a", to=12)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.layers, self.o = nn.Linear(5, 8), [nn.Linear(8, 8).double()], nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.layers[0](self.a(x)))


def test_layers_that_are_not_registered_are_named_as_the_reason() -> None:
    with pytest.raises(MethodError, match=r"a: it is combined with a tensor that no module registers.*nn\.ModuleList"):
        outgrow.widen(Listed().double(), X, factor=2)


def test_a_factor_that_is_too_small_says_so() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    with pytest.raises(GrowthError, match="write a larger factor, or by=1"):
        outgrow.widen(model, X, "0", factor=1.01)


def test_whole_numbers_of_numpy_are_sizes() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    outgrow.widen(model, X, "0", to=np.int64(12))  # type: ignore[arg-type]
    assert model[0].out_features == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_checked_closely(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a tenth, which the arithmetic of bfloat16 would hide, is found: the check computes in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).to(dtype)
    before = copy.deepcopy(model.state_dict())
    growth = outgrow.widen(copy.deepcopy(model), X.to(dtype), factor=1.5)
    assert growth.max_error < 1e-3
    assert growth.tolerance < 0.05
    real = outgrow.verify.outputs.check

    def spoil(grown: nn.Module, *rest: Any) -> Any:
        with torch.no_grad():
            grown[4].weight.mul_(1.1)
        return real(grown, *rest)

    monkeypatch.setattr("outgrow.verify.outputs.check", spoil)
    with pytest.raises(VerifyError, match="differs from the old one"):
        outgrow.widen(model, X.to(dtype), factor=1.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 64), nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.Conv2d(8, 1, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_volume_that_a_transposed_convolution_reads_in_another_shape_grows() -> None:
    model = Decoder().double()
    before = model(X)
    growth = outgrow.widen(model, X, "*", factor=1.5)
    assert [change.volume for change in growth.plan.changes] == ["layers.0", "layers.3"]
    assert model.layers[0].out_features == 96
    torch.testing.assert_close(model(X), before)
