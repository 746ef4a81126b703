"""Values in a run's file: numpy's numbers are read back as such, and what can't be read back is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import outgrow
from outgrow.errors import CheckpointError
from tests.helpers.small_runs import X, mlp, started


def test_numbers_of_numpy_are_saved_and_read_back(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(np.pi * step / 50)))
    optimizer.step()
    scheduler.step()

    class Sampler:
        order = np.arange(5)

        def state_dict(self) -> dict[str, Any]:
            return {"order": self.order}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.order = state["order"]

    def run(sampler: Sampler) -> outgrow.Run:
        return outgrow.Run(model, X, optimizer, [], scheduler, also={"sampler": sampler}, quiet=True)

    run(Sampler()).save(tmp_path / "run.pt", extra={"best": np.float64(0.3)})
    sampler = Sampler()
    sampler.order = np.zeros(5)
    assert run(sampler).load(tmp_path / "run.pt") == {"best": 0.3}
    assert sampler.order.tolist() == [0, 1, 2, 3, 4]


def test_values_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    model = mlp()
    run = started(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
    run.save(tmp_path / "run.pt")
    good = (tmp_path / "run.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"objects of .*Linear"):
        run.save(tmp_path / "run.pt", extra={"layer": nn.Linear(2, 2)})
    assert (tmp_path / "run.pt").read_bytes() == good
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
