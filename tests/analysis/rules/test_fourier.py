"""Fourier neural operators: transforms over space, complex weights, and modes written into a spectrum."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.grow_everywhere import DTYPE, assert_exact_everywhere, growable, randomised, reasons


class Spectral(nn.Module):
    """One layer of a Fourier neural operator in one dimension; complex weights, or pairs of real ones."""

    def __init__(self, pairs: bool = False) -> None:
        super().__init__()
        self.lift, self.skip, self.project, self.pairs = nn.Linear(2, 6), nn.Conv1d(6, 6, 1), nn.Linear(6, 1), pairs
        self.modes = nn.Parameter(torch.randn(6, 6, 4, 2) if pairs else torch.randn(6, 6, 4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x).transpose(1, 2)
        weight = torch.view_as_complex(self.modes) if self.pairs else self.modes
        spectrum = torch.fft.rfft(hidden)
        kept = torch.zeros(len(x), weight.shape[1], spectrum.shape[2], dtype=spectrum.dtype)
        kept[:, :, : weight.shape[2]] = torch.einsum("bix,iox->box", spectrum[:, :, : weight.shape[2]], weight)
        hidden = nn.functional.gelu(torch.fft.irfft(kept, n=hidden.shape[-1]) + self.skip(hidden))
        return self.project(hidden.transpose(1, 2))


def field(batch: int, places: int) -> Tensor:
    return torch.randn(batch, places, 2, dtype=DTYPE, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("pairs", [False, True])
def test_a_spectral_layer_grows_exactly(pairs: bool) -> None:
    model = randomised(Spectral(pairs))
    assert_exact_everywhere(model, field(2, 16), field(3, 20), {"lift", "modes"})
    assert growable(model, field(2, 16))["lift"] == ("r2r", "net2net", "netmorph", "mean")


def test_new_complex_weights_are_complex_and_of_the_usual_size() -> None:
    model = randomised(Spectral())
    outgrow.widen(model, field(2, 16), "lift", to=406, method="r2r")
    new = model.modes[6:, :6].detach()
    old = model.modes[:6, :6].detach()
    for part in (new.real, new.imag):
        assert float(part.std()) == pytest.approx(float(torch.view_as_real(old).std()), rel=0.1)


def test_complex_weights_train_on_with_adam() -> None:
    model = randomised(Spectral())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(field(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    before = model(field(2, 16)).square().mean().item()
    outgrow.widen(model, field(2, 16), "lift", by=2, optimizer=optimizer)
    assert step() == pytest.approx(before, rel=1e-10)
    assert step() < before


def test_complex_weights_come_back_from_a_file(tmp_path: Path) -> None:
    model, x = Spectral().eval(), field(2, 16).float()
    fresh = Spectral().eval()
    outgrow.widen(model, x, "lift", by=2)
    outgrow.save(model, tmp_path / "model.safetensors")
    outgrow.load(fresh, tmp_path / "model.safetensors")
    assert torch.equal(fresh(x), model(x))


def test_a_transform_over_the_features_is_refused() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.out = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.fft.fft(self.one(x)).real)

    assert "Fourier transform runs over it" in reasons(Mixed(), torch.randn(2, 3))["one"]


OPERATORS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, {"r2r", "net2net", "netmorph", "mean"}),
    "group norm": ({"norm": "group_norm"}, {"net2net"}),  # one group of all channels: only whole copies
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPERATORS)
def test_the_fourier_neural_operator_of_neuralop_grows_exactly(kind: str) -> None:
    models = pytest.importorskip("neuralop.models")
    options, methods = OPERATORS[kind]
    torch.manual_seed(0)
    model = models.FNO(n_modes=(4, 4), hidden_channels=6, in_channels=2, out_channels=1, n_layers=2, **options)
    model = randomised(model)
    example, fresh = (torch.randn(batch, 2, size, size, dtype=DTYPE) for batch, size in ((2, 8), (1, 12)))
    assert set(growable(model, example)["lifting.fcs.1"]) == methods
    for method in sorted(methods):
        grown = copy.deepcopy(model)
        outgrow.widen(grown, example, ["lifting.fcs.1", "fno_blocks.fno_skips.*"], factor=2, method=method)
        for x in (example, fresh):
            torch.testing.assert_close(grown(x), model(x), rtol=1e-10, atol=1e-10)
