"""Small networks in small training loops, with `outgrow.Run` and by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import outgrow

X = torch.linspace(-1, 1, 6 * 4, dtype=torch.float64).view(6, 4)


class Mlp(nn.Module):
    """A hidden layer to widen, and equal blocks behind which more can be inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.blocks(torch.tanh(self.stem(x))))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


WIDEN = outgrow.Widen("blocks.0.up", to=12, method="r2r")
DEEPEN = outgrow.Deepen("blocks.0")


def mlp(seed: int = 0) -> Mlp:
    torch.manual_seed(seed)
    return Mlp().double()


def batch(number: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same in every loop."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randint(0, 3, (8,), generator=generator)


def loss_of(model: nn.Module, number: int) -> Tensor:
    x, y = batch(number)
    return nn.functional.cross_entropy(model(x), y)


def train(model: nn.Module, optimizers: Any, number: int) -> Tensor:
    """Make one step of a plain loop; returns its loss."""
    all_optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in all_optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    for optimizer in all_optimizers:
        optimizer.step()
    return loss


def started(model: nn.Module, optimizer: Any, schedule: Any, *rest: Any, **options: Any) -> outgrow.Run:
    return outgrow.Run(model, X, optimizer, schedule, *rest, quiet=True, **options)


def at(step: int, *grow: Any, **options: Any) -> outgrow.At:
    return outgrow.At(step=step, grow=list(grow) or [WIDEN], **options)


def facts(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *others: Any) -> Any:
    """All values of a model, its optimizers and other objects, as copies that can be compared."""
    state = {name: (tensor.clone(), tensor.stride()) for name, tensor in model.state_dict().items()}
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return copy.deepcopy((state, gradients, [one.state_dict() for one in (*optimizers, *others)]))


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same values under the same names."""
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
