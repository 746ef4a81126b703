"""Plans carried out on a GPU: `pytest -m cuda`. The truth is the same growth on the CPU.

The time that it takes is measured by `benchmarks/cuda.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outgrow

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),
]


class Blocks(nn.Module):
    """A residual stream under layer norms."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.up, self.last, self.out = nn.Linear(16, width), nn.LayerNorm(width), nn.Linear(width, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for norm, block in zip(self.norms, self.inner, strict=True):
            x = x + block(norm(x))
        result: Tensor = self.out(self.last(x))
        return result


def trained(model: nn.Module, x: Tensor, amsgrad: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=amsgrad, foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", [None, "net2net"])
def test_moments_grow_on_the_gpu_as_on_the_cpu(dtype: torch.dtype, method: str | None) -> None:
    torch.manual_seed(0)
    model, x = Blocks(2, 24).to(dtype), torch.randn(6, 16, dtype=dtype)
    optimizer = trained(model, x, amsgrad=True)
    twin = copy.deepcopy(model).cuda()
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3, amsgrad=True, foreach=True)
    theirs.load_state_dict(optimizer.state_dict())
    options: dict[str, Any] = {"check": False} if method is None else {"method": method, "check": False}
    names = "*" if method is None else "inner.*.0"
    outgrow.widen(model, x, names, factor=1.5, optimizer=optimizer, **options)
    outgrow.widen(twin, x.cuda(), names, factor=1.5, optimizer=theirs, **options)
    close = {"rtol": 1e-5, "atol": 1e-9} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-6}
    for (name, mine), its in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert mine.shape == its.shape, name
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            found, expected = theirs.state[its][key].cpu(), optimizer.state[mine][key]
            torch.testing.assert_close(found, expected, **close, msg=lambda text, at=f"{name} {key}": f"{at}: {text}")
