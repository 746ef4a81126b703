"""Lightning checkpoints that are damaged, or from before a growth; and compiled LightningModules."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import outgrow
from outgrow.errors import CheckpointError
from tests.helpers.lightning_fit import pytestmark as pytestmark
from tests.helpers.lightning_small import Lit, X, data, trainer
from tests.helpers.training_run import assert_equal

SCHEDULE = [
    outgrow.At(step=2, grow=[outgrow.Widen("model.0", to=12)]),
    outgrow.At(step=6, grow=[outgrow.Widen("model.0", to=14)]),
]


def grow(events: Any = None) -> outgrow.lightning.Grow:
    return outgrow.lightning.Grow(SCHEDULE if events is None else events, X[:4], quiet=True)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:900]), "is damaged, or not a checkpoint.*earlier copy"),
    "empty": (lambda path: path.write_bytes(b""), "is damaged, or not a checkpoint"),
    "text": (lambda path: path.write_text("hello"), "is damaged, or not a checkpoint"),
    "malicious": (
        lambda path: torch.save({"state_dict": Evil()}, path),
        "objects of posix.mkdir, which could run.*trust",
    ),
    "no weights": (lambda path: torch.save({"state_dict": 3}, path), "it has no state_dict"),
    "a list": (lambda path: torch.save([1], path), "it has no state_dict"),
    "gone": (lambda path: path.unlink(), "there is no such file"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is a folder"),
}


def test_files_that_can_not_be_loaded_are_refused_with_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit, path = trainer(grow()), tmp_path / "last.ckpt"
    fit.fit(Lit(), data())
    fit.save_checkpoint(path)
    whole, load = path.read_bytes(), outgrow.lightning.load
    for spoil, reason in FILES.values():
        path.write_bytes(whole)
        spoil(path)
        model = Lit()
        with pytest.raises(CheckpointError, match=f"(?s){reason}"):
            load(model, path)
        assert_equal(dict(model.state_dict()), dict(Lit().state_dict()))
    path.rmdir()
    path.write_bytes(whole)
    assert not (tmp_path / "evil").exists()
    for mistake, reason in (
        (lambda: load(path, Lit()), "swap module and path"),
        (lambda: load(Lit, path), "the class Lit"),
        (lambda: load(Lit().model, path), "not a LightningModule .of type Sequential"),
        (lambda: load(Lit(), None), "and not None"),
        (lambda: load(path), "missing a required argument: 'path'"),
        (lambda: outgrow.lightning.Grow(SCHEDULE), "missing a required argument: 'example'"),
        (lambda: outgrow.lightning.Grow(3, X), "a schedule is a list"),
    ):
        with pytest.raises(outgrow.GrowthError, match=reason):
            mistake()
    assert load(Lit(), path).model[0].out_features == 14


def test_the_best_from_before_a_growth_is_refused_with_the_way_to_test_it(tmp_path: Path) -> None:
    """The way out in the error works."""
    for steps, width in ((1, 8), (3, 12)):
        every = ModelCheckpoint(tmp_path / str(steps), every_n_train_steps=steps, save_top_k=-1)
        fit, model = trainer(grow(), every), Lit()
        fit.fit(model, data())
        best = next(str(path) for path in (tmp_path / str(steps)).iterdir() if path.name.endswith(f"step={steps}.ckpt"))
        every.best_model_path = best
        with pytest.raises(CheckpointError, match=r"has grown (once|2 times) since.*best_model_path"):
            fit.test(model, data(), ckpt_path="best", weights_only=False)
        assert model.model[0].out_features == 14
        small = outgrow.lightning.load(Lit(), best)
        assert fit.test(small, data(), verbose=False) == [{"width": float(width)}]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_module_grows_like_an_uncompiled_one() -> None:
    states = []
    for compiled in (False, True):
        model = Lit()
        fit = trainer(grow())
        fit.fit(torch.compile(model, backend="eager") if compiled else model, data())
        assert model.model[0].out_features == 14
        assert (vars(model).get("_compiler_ctx") is not None) == compiled
        states.append(dict(model.state_dict()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)
