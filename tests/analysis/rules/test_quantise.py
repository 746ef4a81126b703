"""Quantisation-aware training: fake quantisation with fixed scales is a function like others; observers are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao import quantization

import outgrow
from tests.helpers.grow_everywhere import growable, reasons

pytestmark = pytest.mark.filterwarnings("ignore")
X, FRESH = (torch.randn(batch, 5, generator=torch.Generator().manual_seed(batch)) for batch in (8, 3))


def build(config: quantization.QConfig, observing: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).train()
    model.qconfig = config
    model = quantization.prepare_qat(model)
    with torch.no_grad():
        for _ in range(3):
            model(X)
    if not observing:
        model.apply(quantization.disable_observer)
    return model.eval()


def plain() -> quantization.QConfig:
    """Observer and fake quantisation as two operators, one scale for a whole tensor."""
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric, "quant_min": -128, "quant_max": 127}
    weight = quantization.FakeQuantize.with_args(observer=quantization.MovingAverageMinMaxObserver, **symmetric)
    return quantization.QConfig(quantization.FakeQuantize.with_args(quant_min=0, quant_max=255), weight)


@pytest.mark.parametrize("kind", ["plain", "qnnpack"])
def test_with_observers_off_zeros_are_exact(kind: str) -> None:
    model = build(plain() if kind == "plain" else quantization.get_default_qat_qconfig(kind), observing=False)
    assert growable(model, X) == {"0": ("netmorph", "mean"), "2": ("netmorph", "mean")}  # the mean, read by zeros
    for method in (outgrow.NetMorph(), outgrow.NetMorph(zero="writers"), "mean"):
        grown = copy.deepcopy(model)
        outgrow.widen(grown, X, ["0", "2"], factor=2, method=method)
        for x in (X, FRESH):
            torch.testing.assert_close(grown(x), model(x), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grown.train()(x), model.train()(x), rtol=1e-5, atol=1e-6)
            grown.eval(), model.eval()


def test_what_reads_through_quantisation_can_not_cancel() -> None:
    model = build(plain(), observing=False)
    for method in ("r2r", "net2net"):
        with pytest.raises(outgrow.GrowthError, match="fake_quantize"):
            outgrow.widen(model, X, "0", by=2, method=method)


def test_observers_that_are_on_are_refused_with_the_way_out() -> None:
    model = build(quantization.get_default_qat_qconfig("qnnpack"), observing=True)
    assert "disable_observer" in reasons(model, X)["0"]


def test_scales_per_channel_do_not_grow() -> None:
    model = build(quantization.get_default_qat_qconfig("fbgemm"), observing=False)
    assert "integer zero point per channel" in reasons(model, X)["0"]
