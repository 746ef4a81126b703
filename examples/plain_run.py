"""A plain training loop that grows twice on the way, is stopped, and goes on from the small model's constructor.

Run it as it is: `python examples/plain_run.py` (needs scikit-learn for its digits; about ten seconds).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import outgrow

EPOCHS = 10

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
training, held_out = slice(0, 1400), slice(1400, None)

schedule = outgrow.Schedule(
    [
        outgrow.At(epoch=3, grow=[outgrow.Widen("*", factor=2)]),
        outgrow.When(outgrow.plateau("val_loss", patience=1), grow=[outgrow.Deepen(after="5", fade=60)], warmup=20),
    ]
)


def make() -> tuple[nn.Module, torch.optim.Optimizer, outgrow.Run]:
    """Everything as it was before the first growth; the same for a new run and for one that is resumed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    return model, optimizer, outgrow.Run(model, images[:8], optimizer, schedule, scheduler)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: outgrow.Run, until: int) -> float:
    accuracy = 0.0
    while run.epochs < until:
        model.train()
        order = torch.randperm(1400)
        for batch in run.track(order.split(50)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[training][batch]), labels[training][batch])
            loss.backward()
            optimizer.step()
            run.step(loss)
        for scheduler in run.schedulers:
            scheduler.step()
        model.eval()
        with torch.no_grad():
            outputs = model(images[held_out])
        accuracy = (outputs.argmax(1) == labels[held_out]).double().mean().item()
        run.epoch({"val_loss": nn.functional.cross_entropy(outputs, labels[held_out])})
    return accuracy


if __name__ == "__main__":
    model, optimizer, run = make()
    print(run.timeline, end="\n\n")
    train(model, optimizer, run, until=EPOCHS // 2)
    path = Path(tempfile.mkdtemp()) / "run.pt"
    run.save(path)

    model, optimizer, run = make()  # as if in a new process
    run.load(path)
    accuracy = train(model, optimizer, run, until=EPOCHS)
    print(f"\nafter {run.epochs} epochs and {len(run.records)} growths: {accuracy:.1%} of the digits held out are right")
    print(run.cohorts.table(model))
