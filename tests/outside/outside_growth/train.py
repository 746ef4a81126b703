"""python -m outside_growth.train FOLDER: train a small model for nine steps, or go on from FOLDER/half.pt."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import outgrow
from outside_growth import Signum, swish_gate

SCHEDULE = Path(__file__).with_name("schedule.toml")


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)
        self.kinds = nn.Embedding(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.kinds(torch.arange(len(x), device=x.device) % 2)
        y: Tensor = self.out(swish_gate(self.value(x), self.gate(x), 1.5))
        return y


def build() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Gated().double()
    return model, torch.randn(6, 4, dtype=torch.float64)


def main(folder: Path) -> None:
    model, x = build()
    optimizer = Signum(model.parameters(), lr=0.01)
    run = outgrow.Run(model, x, optimizer, SCHEDULE, quiet=True)
    half = folder / "half.pt"
    resumed = half.exists()
    if resumed:
        run.load(half)
    for step in range(5 if resumed else 0, 9):
        if step == 5 and not resumed:
            run.save(half)
        data = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        before = model(x)
        run.step()
        torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    run.save(folder / ("resumed.pt" if resumed else "whole.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
