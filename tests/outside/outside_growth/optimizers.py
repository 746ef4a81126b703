"""Signum: steps of one length, in the direction of the momentum's signs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import outgrow


class Signum(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state: dict[str, Any] = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    parameter -= group["lr"] * momentum.lerp_(parameter.grad, 0.1).sign()


outgrow.register_optimizer(Signum, {"momentum": "first moment"})
