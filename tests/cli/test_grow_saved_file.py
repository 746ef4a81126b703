"""`outgrow grow FILE`: a file of outgrow.save goes in, a larger one that computes the same comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outgrow
from outgrow.cli.main import main
from outgrow.modules.gates import gates_of
from outgrow.saving.save_load import describe

MODEL = "tests.cli.test_grow_saved_file:build"


def build() -> tuple[nn.Module, torch.Tensor]:
    """A model with a block of its own kind, and an example."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file of a model that has grown once."""
    model, x = build()
    outgrow.widen(model, x, "0", to=10)
    outgrow.save(model, tmp_path / "old.safetensors")
    return tmp_path / "old.safetensors"


def outputs(path: Path) -> torch.Tensor:
    model, x = build()
    result: torch.Tensor = outgrow.load(model, path)(x)
    return result


def test_the_new_file_computes_the_same_and_records_both_growths(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new.safetensors"
    assert main(["grow", str(old), "--model", MODEL, "--widen", "0=1.6", "--seed", "2", "--out", str(new)]) == 0
    assert "10 → 16" in capsys.readouterr().out
    assert describe(new).tensors["0.weight"] == ("F32", (16, 4))
    assert len(describe(new).histories[""]) == 2
    torch.testing.assert_close(outputs(new), outputs(old))


def test_a_file_holds_a_fade(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.safetensors"
    arguments = ["--deepen", "0=+1", "--fade", "4", "--out", str(new)]
    assert main(["grow", str(old), "--model", MODEL, *arguments]) == 0, capsys.readouterr().err
    assert "faded in over 4 steps" in capsys.readouterr().out
    torch.testing.assert_close(outputs(new), outputs(old))
    model, x = build()
    outgrow.load(model, new)
    assert [(gate.done, gate.steps) for gate in gates_of(model).values()] == [(0, 4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        model(x).sum().backward()
        optimizer.step()
    assert not gates_of(model)
    assert not torch.allclose(model(x), outputs(old))  # the new block is there


def test_the_file_of_a_run_gives_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = build()
    run = outgrow.Run(model, x, torch.optim.SGD(model.parameters(), lr=0.1), [], quiet=True)
    run.save(tmp_path / "run.pt")
    new = tmp_path / "new.safetensors"
    assert main(["grow", str(tmp_path / "run.pt"), "--model", MODEL, "--widen", "0=12", "--out", str(new)]) == 0
    assert "it holds weights and growths" in capsys.readouterr().out
    torch.testing.assert_close(outputs(new), model(x))


WRONG = {
    "no model": (["--out", "new"], "add --model TARGET, the small model that it was grown from"),
    "training state": (["--model", MODEL, "--out", "new", "--training-state"], "which has no training state"),
    "a type": (["--model", MODEL, "--out", "new", "--dtype", "bfloat16"], "whose model keeps its type"),
    "no file": (["--model", MODEL], "--out FILE is missing"),
    "another model": (["--model", "torch.nn:Identity", "--input", "4", "--out", "new"], "does not fit this model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_reported_and_nothing_is_written(case: str, old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, reason = WRONG[case]
    assert main(["grow", str(old), "--widen", "0=1.5", *options]) == 2
    assert reason in capsys.readouterr().err
    assert main(["grow", str(old), "--widen", "0=1.6", "--model", MODEL, "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert main(["grow", str(old), "--widen", "0=1.6", "--model", MODEL, "--out", str(old)]) == 2
    assert {path.name for path in old.parent.iterdir()} == {old.name}
