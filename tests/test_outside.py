"""A plugin package (tests/outside), installed: what it registers works in runs and commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import outgrow
from outgrow.cli.main import main

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the package is installed: built from its pyproject.toml, without a network."""
    pytest.importorskip("setuptools", minversion="70.1")  # the first that builds wheels by itself
    folder = tmp_path_factory.mktemp("outside")
    source = shutil.copytree(OUTSIDE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-compile"]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder / "site"), str(source)],
        capture_output=True,
        text=True,
    )
    if pip.returncode and "No module named pip" in pip.stderr:
        pytest.skip("pip is not installed here")
    assert pip.returncode == 0, pip.stderr
    return folder / "site"


def python(installed: Path, *arguments: str) -> str:
    """Run Python with the installed package, outside its source folder."""
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


class Plain(nn.Module):
    """The same parameters, without code of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.kinds = nn.Embedding(2, 4)


@pytest.fixture(scope="session")
def used(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two commands, and then a run that is saved half way, in one process: the folder of the run and what was printed."""
    folder = tmp_path_factory.mktemp("used")
    schedule, model = str(installed / "outside_growth" / "schedule.toml"), "outside_growth.train:build"
    commands = [["timeline", schedule, "--model", model], ["inspect", model]]
    program = (
        "import pathlib; from outgrow.cli.main import main; "
        f"[main(command) for command in {commands!r}]; "
        f"from outside_growth.train import main; main(pathlib.Path({str(folder)!r}))"
    )
    return folder, python(installed, "-c", program)


def test_a_run_is_saved_and_resumed_in_a_new_process(installed: Path, used: tuple[Path, str]) -> None:
    folder, _ = used
    python(installed, "-m", "outside_growth.train", str(folder))
    names = "whole.pt", "half.pt", "resumed.pt"
    whole, half, resumed = (torch.load(folder / name, weights_only=True) for name in names)
    assert half["model"]["value.weight"].shape == (12, 4)
    assert whole["model"]["gate.weight"].shape == (14, 4)
    assert whole["model"]["kinds.weight"].shape == (5, 4)
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    states = [run["optimizers"][0]["state"] for run in (whole, resumed)]
    assert states[0]
    for key, state in states[0].items():
        assert torch.equal(state["momentum"], states[1][key]["momentum"])
    assert "outside_growth" not in sys.modules  # a file's history is read without the package
    model = outgrow.load(Plain().double(), folder / "whole.pt")
    assert (model.value.out_features, model.gate.out_features, model.out.in_features) == (14, 14, 14)


def test_commands_find_its_method_and_operator_by_the_entry_point(used: tuple[Path, str]) -> None:
    _, printed = used
    assert "8 → 12" in printed
    assert "12 → 14" in printed
    assert "kinds: 2 → 5" in printed
    (row,) = (line for line in printed.splitlines() if line.startswith("value "))
    assert "echo" in row


def test_a_plugin_that_fails_is_reported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken-1.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (broken / "entry_points.txt").write_text("[outgrow]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["inspect", "torch.nn:Identity", "--input", "3"]) == 0
    assert "the plugin broken (no_such_module) can't be loaded: ModuleNotFoundError" in capsys.readouterr().err
