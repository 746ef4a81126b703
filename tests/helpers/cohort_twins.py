"""A network that has grown twice, steps on it, and comparisons."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import outgrow

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
Y = torch.randn(8, 2, generator=torch.Generator().manual_seed(1)).double()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2)).double()


def twice_grown() -> nn.Module:
    model = small()
    outgrow.widen(model, X, "*", by=4)
    outgrow.grow(model, X, outgrow.Widen("1.f.0", by=2), outgrow.Deepen(after="1"))
    return model


def backward(model: nn.Module) -> Tensor:
    model.zero_grad()
    loss = (model(X) - Y).square().mean()
    loss.backward()
    return loss


def step(model: nn.Module, *optimizers: Optimizer) -> None:
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hooks(optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class RecordingSGD(SGD):
    """SGD that records the rates of its steps."""

    seen: list[Any]

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        self.seen.append([float(group["lr"]) for group in self.param_groups])
        return super().step()
