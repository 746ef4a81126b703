"""Cases that a brief check must not miss: code for train mode only, parts without finite values, huge masked values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import outgrow
from outgrow.verify import brief_check as brief
from outgrow.verify import outputs as verify
from tests.helpers.small_runs import at


class Odd(nn.Module):
    """Its code uses the units differently in train mode; `how` names the difference."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.calls = how, 0
        self.up, self.out, self.norm = nn.Linear(4, 8), nn.Linear(8, 3), nn.BatchNorm1d(5)
        nn.init.normal_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Any:
        h = torch.nn.functional.gelu(self.up(x))
        z = self.out(h)
        if self.how == "statistics over units":  # x: (batch, 5, 4)
            return self.out(torch.nn.functional.gelu(self.norm(self.up(x))))
        if self.how == "another tensor":
            return z, torch.nn.functional.normalize(h if self.training else z, dim=-1).sum(-1)
        if self.how == "a penalty":
            return z, (h if self.training else x).abs().mean()
        if self.how == "a size":
            return z * (8 / self.up.out_features if self.training else 1.0)
        if self.how == "later":
            self.calls += self.training
            return self.out(torch.nn.functional.normalize(h, dim=-1) if self.training and self.calls > 3 else h)
        assert self.how == "an attribute"
        return self.out(torch.nn.functional.normalize(h, dim=-1) if self.training and getattr(self, "phase", 1) == 2 else h)


@pytest.mark.parametrize("how", ["statistics over units", "another tensor", "a penalty", "a size", "later", "an attribute"])
def test_code_that_runs_only_in_train_mode_is_not_missed(how: str) -> None:
    """Each of these is exact in eval mode and wrong in train mode: a run must refuse it, as `outgrow.widen` does."""
    model = Odd(how).double()
    x = torch.randn(6, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer = SGD(model.parameters(), lr=0.01)
    try:
        run = outgrow.Run(model, x, optimizer, [at(5, outgrow.Widen("up", to=12, method="r2r"))], quiet=True)
        for step in range(5):
            model.train()
            found = model(x)
            (found[0] if isinstance(found, tuple) else found).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                model.phase = 2
            run.step()
    except outgrow.GrowthError:
        assert model.up.out_features == 8
    else:
        pytest.fail("grown, although the outputs in train mode have changed")


class Losing(nn.Module):
    """Returns its loss, which is NaN if all labels are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.out(torch.relu(self.up(x)))
        return torch.nn.functional.cross_entropy(logits, y, ignore_index=-100), logits


def test_a_part_without_finite_values_is_not_used() -> None:
    model = Losing()
    example = torch.randn(6, 4), torch.tensor([-100, 0, 1, 2, 0, 1])
    optimizer = SGD(model.parameters(), lr=0.01)
    run = outgrow.Run(model, example, optimizer, [at(1, outgrow.Widen("up", to=12))], quiet=True)
    assert run.step() is not None
    assert model.up.out_features == 12


def test_huge_masked_values_do_not_hide_the_rest() -> None:
    """Halved logits next to a masked column of -1e9 count as different."""
    logits = torch.randn(4, 6)
    logits[:, 2] = -1e9
    halved = torch.where(logits > -1e8, logits / 2, logits)
    assert verify.error([logits], [logits.clone()]) == 0
    assert verify.error([logits], [halved]) > 0.1
    moved = logits.clone()
    moved[1, 2] = 0
    assert verify.error([logits], [moved]) == 1


class Missing(nn.Module):
    """Uses NaN for missing values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.up(x)).masked_fill(x[:, :1] > 9, torch.nan).nan_to_num(0.0))


def test_a_nan_argument_in_both_modes_is_equal() -> None:
    assert brief.plan_brief_check(Missing(), torch.randn(4, 4)) is not None
