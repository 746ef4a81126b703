"""One growth record in files of every kind: a later version is refused before anything else is read, and damage is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import AdamW

import outgrow
from outgrow.errors import CheckpointError
from outgrow.history.growths_on_model import history
from outgrow.integrations.growth_file import read_growth_file, write_growth_file
from outgrow.model.journal import Journal
from outgrow.saving.growth_record import read_record
from outgrow.saving.growths_in_state_dict import KEY, growth_entries, unpack
from outgrow.saving.save_load import describe
from tests.helpers.small_runs import at, mlp, started


@pytest.fixture
def run() -> outgrow.Run:
    """A run that has grown once."""
    model = mlp()
    run = started(model, AdamW(model.parameters()), [at(1)])
    run.step()
    return run


def in_weights(run: outgrow.Run, folder: Path, version: Any) -> Callable[[nn.Module], Any]:
    path = folder / "model.safetensors"
    outgrow.save(run.model, path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = {**file.metadata(), "outgrow": "{}", "outgrow.version": str(version)}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata)
    return lambda model: outgrow.load(model, path)


def in_run(run: outgrow.Run, folder: Path, version: Any) -> Callable[[nn.Module], Any]:
    path = folder / "run.pt"
    run.save(path)
    torch.save({"outgrow": {}, "version": version}, path)
    return lambda model: outgrow.load(model, path)


def beside(run: outgrow.Run, folder: Path, version: Any) -> Callable[[nn.Module], Any]:
    write_growth_file(folder, run)
    torch.save({"version": version}, folder / "outgrow.pt")
    return lambda model: read_growth_file(folder)


def in_state_dict(run: outgrow.Run, folder: Path, version: Any) -> Callable[[nn.Module], Any]:
    text = json.dumps({"version": version}).encode()
    state = {**growth_entries(run.model), KEY: torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    def load(model: nn.Module) -> None:
        with Journal() as journal:
            unpack(model, dict(state), journal)

    return load


@pytest.mark.parametrize("written", [in_weights, in_run, beside, in_state_dict])
def test_a_later_version_is_refused_whatever_else_is_in_the_file(written: Any, run: outgrow.Run, tmp_path: Path) -> None:
    model = mlp(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="has format version 2, and this outgrow reads up to 1: install a newer outgrow"):
        written(run, tmp_path, 2)(model)
    with pytest.raises(CheckpointError, match="is damaged: its format version reads 'two': use an earlier copy of the file"):
        written(run, tmp_path, "two")(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_files_of_all_kinds_hold_the_same_record(run: outgrow.Run, tmp_path: Path) -> None:
    outgrow.save(run.model, tmp_path / "model.safetensors")
    run.save(tmp_path / "run.pt")
    one, other = describe(tmp_path / "model.safetensors"), describe(tmp_path / "run.pt")
    travelling = read_record(bytes(growth_entries(run.model)[KEY].tolist()), "the checkpoint")
    for record in (one, other, travelling):
        assert (record.model, record.histories) == ("Mlp", {"": history(run.model)})
        assert (dict(record.gates), list(record.drifts)) == ({}, [])
    assert one.tensors == other.tensors


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "model": "Mlp", "histories": {"": [3]}}', "[" * 100_000])
def test_a_record_that_is_not_as_written_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"run\.pt is damaged: its growth history can't be read .* use an earlier copy"):
        read_record(text, "run.pt")
