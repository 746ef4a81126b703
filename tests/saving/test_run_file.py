"""Only the weights of a run's file: into the small model or a grown one, in Python and on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import SGD

import outgrow
from outgrow.cli import main as cli
from outgrow.errors import CheckpointError
from outgrow.history.growths_on_model import history
from outgrow.integrations.growth_file import write_growth_file
from tests.helpers.small_runs import X, at, mlp, started
from tests.helpers.training_run import Net, Trial, assert_equal


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Path]:
    """A run within the fade of a new block, and its file."""
    path = tmp_path_factory.mktemp("run") / "run.pt"
    trial = Trial(check=False).go(21)
    trial.run.save(path)
    return trial, path


def outputs(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(data)
    model.train()
    return result


@pytest.mark.parametrize("steps", [0, 12, 20], ids=["small", "half grown", "grown"])
def test_a_model_takes_the_weights_of_a_run(steps: int, trial: tuple[Trial, Path]) -> None:
    one, path = trial
    model = Trial(check=False).go(steps).model
    drawn = torch.get_rng_state()
    assert outgrow.load(model, path) is model
    assert_equal(dict(model.state_dict()), dict(one.model.state_dict()))
    assert torch.equal(outputs(model, one.data), outputs(one.model, one.data))  # the gate is restored
    assert len(history(model)) == len(history(one.model))
    assert torch.equal(torch.get_rng_state(), drawn)
    again = outgrow.load(Net(), path)
    outgrow.save(again, path.with_suffix(".safetensors"))
    assert_equal(dict(outgrow.load(Net(), path.with_suffix(".safetensors")).state_dict()), dict(model.state_dict()))


def test_a_run_that_has_not_grown_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(check=False).go(2)
    trial.run.save(tmp_path / "run.pt")
    model = outgrow.load(Net(), tmp_path / "run.pt")
    assert_equal(dict(model.state_dict()), dict(trial.model.state_dict()))
    assert cli.main(["inspect", str(tmp_path / "run.pt")]) == 0
    assert "run.pt: Net, grown 0 times" in capsys.readouterr().out


def changed(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **values}


def spoiled(state: dict[str, Any]) -> Any:
    return {**state, "model": {**state["model"], "head.1.bias": torch.full((4,), float("nan"))}}


def lacking(state: dict[str, Any]) -> Any:
    return {**state, "model": {name: value for name, value in state["model"].items() if name != "head.1.bias"}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(version=99), "format version 99"),
        (changed(model=3), "holds no model"),
        (spoiled, "not finite"),
        (lacking, r"run\.pt: [\s\S]*head\.1\.bias"),
        (lambda state: state["model"], "was not written by Run.save"),
    ],
)
@pytest.mark.parametrize("steps", [0, 19])
def test_a_refusal_leaves_the_model_as_it_was(
    change: Any, reason: str, steps: int, trial: tuple[Trial, Path], tmp_path: Path
) -> None:
    state = torch.load(trial[1], weights_only=False)
    del state["checksum"], state["checksums"]
    torch.save(change(state), tmp_path / "run.pt")
    other = Trial(check=False).go(steps)
    before, expected = other.state(), outputs(other.model, other.data)
    with pytest.raises(CheckpointError, match=reason):
        outgrow.load(other.model, tmp_path / "run.pt")
    assert_equal(dict(other.model.state_dict()), {name: before["model"][name] for name in other.model.state_dict()})
    assert torch.equal(outputs(other.model, other.data), expected)


def test_another_model_is_refused(trial: tuple[Trial, Path]) -> None:
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="does not fit this model"):
        outgrow.load(model, trial[1])
    assert_equal(dict(model.state_dict()), before)


def test_the_command_line_takes_a_runs_file(trial: tuple[Trial, Path], capsys: pytest.CaptureFixture[str]) -> None:
    one, path = trial
    outgrow.save(one.model, path.with_suffix(".safetensors"))
    facts = []
    for file in (path, path.with_suffix(".safetensors")):
        assert cli.main(["inspect", str(file), "--json"]) == 0
        facts.append(json.loads(capsys.readouterr().out))
    assert {**facts[0], "path": ""} == {**facts[1], "path": ""}
    assert cli.main(["inspect", str(path), "--model", "tests.helpers.training_run:Net", "--input", "1,6,6"]) == 0
    assert "blocks.0 + 2 alike" in capsys.readouterr().out


def test_a_run_says_that_a_file_holds_only_weights(tmp_path: Path) -> None:
    """The way out in the error works."""
    model, small = mlp(), mlp(1)
    outgrow.widen(model, X, "blocks.0.up", to=12)
    run = started(small, SGD(small.parameters(), lr=0.1), [at(3)])
    before = {name: value.clone() for name, value in small.state_dict().items()}
    saved, plain, renamed = tmp_path / "w.safetensors", tmp_path / "plain.safetensors", tmp_path / "run.pt"
    outgrow.save(model, saved)
    renamed.write_bytes(saved.read_bytes())
    safetensors.torch.save_file(mlp(2).state_dict(), plain)
    for path in (saved, renamed):
        with pytest.raises(
            CheckpointError, match=r"written by outgrow\.save, and not by Run\.save.*outgrow\.load\(model, path\)"
        ):
            run.load(path)
    with pytest.raises(CheckpointError, match=r"holds only weights, and no run: .*safetensors\.torch\.load_file\(path\)"):
        run.load(plain)
    write_growth_file(tmp_path, run)
    with pytest.raises(CheckpointError, match="belongs to a checkpoint folder of a Trainer"):
        run.load(tmp_path / "outgrow.pt")
    assert_equal(dict(small.state_dict()), before)
    small.load_state_dict(safetensors.torch.load_file(plain))
    assert_equal(dict(small.state_dict()), dict(mlp(2).state_dict()))
    assert_equal(dict(outgrow.load(small, saved).state_dict()), dict(model.state_dict()))


def test_a_file_of_save_that_begins_like_a_zip_file_is_read(tmp_path: Path) -> None:
    """It begins with the length of its header: 19,280 reads b"PK"."""
    path = tmp_path / "model.safetensors"
    outgrow.save(mlp(), path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header, rest = path.read_bytes()[8 : 8 + length], path.read_bytes()[8 + length :]
    path.write_bytes((19280).to_bytes(8, "little") + header.ljust(19280) + rest)
    assert path.read_bytes()[:2] == b"PK"
    assert_equal(dict(outgrow.load(mlp(1), path).state_dict()), dict(mlp().state_dict()))
