"""Files of version 0.1.0 in every format: each loads, and the model's outputs equal those when it was saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
import outgrow.accelerate
import outgrow.dcp
import outgrow.lightning
from outgrow.history.growths_on_model import history
from outgrow.saving.save_load import describe
from tests.helpers.small_runs import X, at, mlp, started

FILES = Path(__file__).parents[1] / "files"
SCHEDULE = [at(2), outgrow.At(step=3, grow=[outgrow.Deepen("blocks.0", fade=5)])]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def check(model: nn.Module, expected: Tensor) -> None:
    """Compare outputs; the files were written at step 4, within the fade of a new block."""
    torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)
    assert [len(plan.changes) for plan in history(model)] == [1, 1]


def test_a_run_file() -> None:
    model = mlp(1)
    run = started(model, SGD(model.parameters(), lr=0.05, momentum=0.9), SCHEDULE)
    expected = run.load(FILES / "run-0.1.0.pt")["outputs"]
    assert run.steps == 4
    check(model, expected)
    check(outgrow.load(mlp(2), FILES / "run-0.1.0.pt"), expected)


def test_a_weights_file() -> None:
    """It holds the model of the run file."""
    path = FILES / "model-0.1.0.safetensors"
    check(outgrow.load(mlp(3), path), outgrow.load(mlp(2), FILES / "run-0.1.0.pt")(X))
    assert describe(path).checksums is None


class Kept:
    """The outputs of the saved model, as part of a checkpoint of Accelerate."""

    outputs: Tensor

    def state_dict(self) -> dict[str, Tensor]:
        return {"outputs": self.outputs}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.outputs = state["outputs"]


def test_a_checkpoint_of_accelerate() -> None:
    """`outgrow.pt` besides the files of Accelerate; Transformers' Trainer has the same file."""
    accelerator, kept = accelerate.Accelerator(cpu=True), Kept()
    model = mlp(1)
    model, optimizer = accelerator.prepare(model, SGD(model.parameters(), lr=0.05, momentum=0.9))
    run = started(model, optimizer, SCHEDULE)
    outgrow.accelerate.attach(run, accelerator)
    accelerator.register_for_checkpointing(kept)
    accelerator.load_state(str(FILES / "accelerate-0.1.0"))
    assert run.steps == 4
    check(model, kept.outputs)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(1)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def test_a_checkpoint_of_lightning() -> None:
    path = FILES / "lightning-0.1.0.ckpt"
    check(outgrow.lightning.load(Lit(), path), torch.load(path, weights_only=True)["outputs"])


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_distributed_checkpoint() -> None:
    model, path = mlp(1), FILES / "dcp-0.1.0"
    outgrow.dcp.regrow(model, path)
    state: dict[str, Any] = {"model": model.state_dict(), "outputs": torch.empty(6, 3, dtype=torch.float64)}
    dcp.load(state, checkpoint_id=path)
    check(model, state["outputs"])
