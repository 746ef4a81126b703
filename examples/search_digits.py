"""Search for a network by growth: error against parameters on scikit-learn's digits, from a parent with 4 channels.

Run it as it is: `python examples/search_digits.py [FOLDER]` (needs Optuna and scikit-learn; about a minute on two cores). It
starts two workers, `outgrow search worker search_digits:describe --study digits --storage FOLDER/search.log`, on one journal
file, and writes FOLDER/report.html. Stop it at any moment: the same command goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import outgrow

TRIALS, EPOCHS = int(os.environ.get("TRIALS", 24)), 2
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
training, held_out = slice(0, 1400), slice(1400, None)


def parent() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def train(model: nn.Module, optimizer: torch.optim.Optimizer, trial: Any) -> dict[str, float]:
    """Two epochs, then the error on the images held out."""
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[training][batch]), labels[training][batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(images[held_out]).argmax(1) == labels[held_out]
    return {"error": 1 - right.double().mean().item()}


def describe() -> outgrow.Search:
    """The search; each worker process calls this."""
    torch.set_num_threads(1)
    return outgrow.Search(
        parent(),
        images[:8],
        outgrow.Space(factors=(1.5, 2), deepen=("2", "6"), kernels=(5,), parameters=20_000),
        train,
        ["error", "parameters"],
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        trials=TRIALS,
        population=6,
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "outgrow", "search"]
    study = ["--study", "digits", "--storage", str(folder / "search.log")]
    worker = [*command, "worker", "search_digits:describe", *study]
    running = [subprocess.Popen(worker, cwd=Path(__file__).parent) for _ in range(2)]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit("a worker has failed")
    subprocess.run([*command, "report", *study, "--out", str(folder / "report.html")], check=True)
    print(f"\nthe report: {folder / 'report.html'}")
