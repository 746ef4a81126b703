"""Run commands for tests of the command line, in a temporary folder with models."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import outgrow
from outgrow.cli.main import main

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 7), nn.Linear(4, 7)
    def forward(self, x, y):
        return (self.a(x) * self.b(y)).sum(1)

def chain():
    return nn.Sequential(nn.Linear(5, 6), *(Block() for _ in range(4)), nn.Linear(6, 2))

def words():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 2)), torch.zeros(2, 3, dtype=torch.int64)

def keywords():
    return Two(), {"x": torch.zeros(2, 3), "y": torch.zeros(2, 4)}

def fails():
    raise ValueError("out of luck")

def wants(size):
    return nn.Linear(size, size)

ready = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
number = 7
"""

SCHEDULE = """
[[growth]]
epoch = 5
grow = [{ widen = "0", to = 16 }]

[[growth]]
when = { rule = "plateau", metric = "val_loss" }
grow = [{ deepen = "1", method = "net2net" }]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command in a temporary folder, and returns exit code, stdout and stderr."""
    (tmp_path / "given_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("this is no Python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("COLUMNS", "90")
    for name in ("given_models", "broken_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def command(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(str(stop.code))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def row(text: str, name: str) -> list[str]:
    """The cells of a table's row, found by its first cell."""
    line = next(line for line in text.splitlines() if re.split(r"  +", line)[0] == name)
    return re.split(r"  +", line)


@pytest.fixture
def checkpoint(tmp_path: Path, run: Run) -> Path:
    """A file of the grown model `ready`."""
    exec(MODELS, names := {})
    model = names["ready"]
    outgrow.widen(model, torch.zeros(2, 4), "0", to=12, method="r2r")
    outgrow.widen(model, torch.zeros(2, 4), "0", to=13, method="random")
    outgrow.save(model, tmp_path / "grown.safetensors")
    return tmp_path / "grown.safetensors"


def lean(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, without the tests' stand-ins for torchvision."""
    environment = {**os.environ, "COLUMNS": "110", "PYTHONWARNINGS": "", **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )
