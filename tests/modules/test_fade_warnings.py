"""Fades in progress are reported, with a warning when weights are written without them; so is a mode that was not compared."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
from tests.helpers.lightning_fit import pytestmark as pytestmark
from tests.helpers.lightning_small import Lit, data
from tests.helpers.lightning_small import trainer as lightning_trainer
from tests.helpers.small_runs import X, mlp
from tests.helpers.transformers_trainer import build, trainer

TOKENS = {"input_ids": torch.arange(12).view(2, 6)}


def steps(model: nn.Module, count: int, loss: Any) -> None:
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(count):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def test_a_report_says_that_weights_alone_are_another_model_while_something_fades_in(tmp_path: Path) -> None:
    """The line is shown until the fade has ended."""
    model = mlp()
    note = "until then a plain state_dict, loaded elsewhere, computes something else"
    assert f"fading in for 4 more steps: {note}" in str(outgrow.deepen(model, X, "blocks.0", fade=4))
    steps(model, 2, lambda model: model(X).sum())
    assert f"fading in for 2 more steps: {note}" in str(outgrow.widen(model, X, "blocks.0.up", by=2))
    other = mlp()
    outgrow.deepen(other, X, "blocks.0")
    outgrow.widen(other, X, "blocks.0.up", by=2)
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(other(X), model(X))
    outgrow.save(model, tmp_path / "model.safetensors")
    assert torch.equal(outgrow.load(mlp(), tmp_path / "model.safetensors")(X), model(X))
    steps(model, 2, lambda model: model(X).sum())
    assert "fading" not in str(outgrow.widen(model, X, "blocks.0.up", by=2))
    other = mlp()
    outgrow.deepen(other, X, "blocks.0")
    outgrow.widen(other, X, "blocks.0.up", by=4)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    assert "fading" not in str(
        outgrow.widen(model, X, "blocks.0.up", by=2, fade=3)
    )  # fading weights are the tensors that are saved


def test_save_pretrained_warns_while_something_fades_in(tmp_path: Path) -> None:
    model = build().eval()
    outgrow.deepen(model, TOKENS, "model.layers.0", fade=2)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        with pytest.warns(UserWarning, match=r"save_pretrained writes weights without the fade.*Train 2 more steps first"):
            one.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert not torch.allclose(again(**TOKENS).logits, model(**TOKENS).logits)  # the warning is right
    model.state_dict()
    outgrow.save(model, tmp_path / "own.safetensors")
    steps(model, 2, lambda model: model(**TOKENS).logits.sum())
    model.save_pretrained(tmp_path)
    assert not any(module._state_dict_pre_hooks for module in model.modules())
    torch.testing.assert_close(type(model).from_pretrained(tmp_path)(**TOKENS).logits, model(**TOKENS).logits)


def test_activations_that_fade_in_warn_too() -> None:
    class Ours(nn.Sequential):
        def save_pretrained(self) -> Any:
            return self.state_dict()

    model = Ours(nn.Linear(4, 4), outgrow.PActivation(nn.Tanh(), steps=3))
    with pytest.warns(UserWarning, match="Train 3 more steps"):
        model.save_pretrained()


def test_a_trainer_that_ends_during_a_fade_warns(tmp_path: Path) -> None:
    events = [outgrow.At(step=2, grow=[outgrow.Deepen("model.layers.0", fade=50)])]
    one = trainer(tmp_path, events, save_steps=2, max_steps=4)
    early = pytest.warns(UserWarning, match="would still fade in at the end of the run: it grows at step 2 of 4, and fade=50")
    with early, pytest.warns(UserWarning, match="training has ended during a fade, fading in for 48 more steps"):
        one.train()
    assert (tmp_path / "checkpoint-4").is_dir()
    with pytest.warns(UserWarning, match=r"writes weights without the fade.*Train 48 more steps"):
        one.save_model(str(tmp_path / "final"))


def test_a_lightning_run_that_ends_during_a_fade_warns() -> None:
    class Deep(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp().float()

    event = outgrow.At(step=2, grow=[outgrow.Deepen("model.blocks.0", fade=50)])
    fit = lightning_trainer(outgrow.lightning.Grow([event], X[:4].float(), quiet=True))
    with pytest.warns(UserWarning, match="training has ended during a fade, fading in for 44 more steps"):
        fit.fit(Deep(), data())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.norm(self.a(x))))


def test_a_report_says_that_train_mode_was_not_compared() -> None:
    """A batch norm does not run on a single sample in train mode."""
    report = str(outgrow.widen(Normed(), X[:1].float(), "a", by=2))
    assert "train mode was not compared" in report
    assert "Expected more than 1 value per channel" in report
    assert "give one with more samples" in report
    assert "train mode" not in str(outgrow.widen(Normed(), X[:2].float(), "a", by=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "train mode" not in str(outgrow.widen(Normed(), X[:1].float(), "a", by=2, check=False))
