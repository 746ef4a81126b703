"""The search for the volume that causes a clash ends at the first progress, with the same result as a complete search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow
from outgrow.transforms.widen import settle_sizes
from outgrow.transforms.widen.fit_attributes import Fitter, fit


class Fixed(nn.Module):
    """Its code names the size of its inner layer, behind layers whose sizes are attributes of its own."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.parts = size // 2
        self.up, self.gate, self.down = nn.Linear(4, size), nn.Linear(4, size), nn.Linear(size, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x)).view(-1, 2, self.parts).flatten(1)
        return x + self.down(y * self.gate(x).view(-1, 6))


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = 6
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)).view(-1, self.size))


def grown(monkeypatch: pytest.MonkeyPatch, complete: bool) -> tuple[list[Any], list[str], int]:
    """The shapes of the grown model, the report, and the number of passes that it took."""
    passes: list[int] = []
    run = Fitter.run

    def counted(self: Fitter, *args: Any) -> Any:
        passes.append(1)
        return run(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Fitter, "run", counted)
        if complete:
            patched.setattr(settle_sizes, "fit", lambda fitter, plan, prediction, past=None: fit(fitter, plan, prediction))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), Fixed(), Free(), Fixed(), Free(), nn.Linear(4, 2)).double()
        x = torch.randn(5, 3, dtype=torch.float64)
        before = model(x)
        report = outgrow.widen(model, x, "*", factor=2)
        torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    return [tuple(p.shape) for p in model.parameters()], str(report).splitlines(), len(passes)


def test_the_search_ends_at_the_first_progress_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, report, passes = grown(monkeypatch, complete=False)
    expected, complete_report, more = grown(monkeypatch, complete=True)
    assert shapes == expected
    assert report == complete_report
    assert any("does not follow its size" in line for line in report)
    assert passes < more
