"""Training steps on one size or several, with AdamW on a learning rate that warms up and falls along a cosine.

On CUDA the steps on the same members are replays of one graph: all that they need lies on the device, the places of all batches
in the data, the rates, and a clock that counts steps. Without CUDA the same steps are made one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments.training.background import captured

Members = Sequence[nn.Module]


class Task(Protocol):
    """Data to train on. places: of the batch with this seed; taken: that batch, from its places on the device."""

    device: str
    rate: float

    def places(self, seed: int) -> Tensor: ...

    def taken(self, places: Tensor) -> tuple[Tensor, Tensor]: ...

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor: ...


def precision(device: str) -> AbstractContextManager[Any]:
    """Products in bfloat16 on CUDA."""
    on_cuda = torch.device(device).type == "cuda"
    return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if on_cuda else nullcontext()


@contextmanager
def own_stream(device: str) -> Iterator[None]:
    """A CUDA stream for families and their graphs, since the default one can't be recorded.

    Members hold views of shared parameters, whose gradients are added up on the stream on which the views were made.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class Training:
    """A model or family with its optimizer."""

    def __init__(self, task: Task, model: nn.Module, steps: int, seed: int) -> None:
        self.task, self.model, self.steps, self.seed, self.done = task, model, steps, seed, 0
        self.on_cuda = torch.device(task.device).type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.01, fused=self.on_cuda)

    def run(self, members: Callable[[], Members], steps: int) -> None:
        """So many steps, each on the members that the function returns for it."""
        numbers = range(self.done, self.done + steps)
        self.places = torch.stack([self.task.places(self.seed * 10**6 + number) for number in numbers]).to(self.task.device)
        self.rates = [self.task.rate * self.factor(number) for number in numbers]
        self.clock = torch.zeros(1, dtype=torch.long, device=self.task.device)
        if self.on_cuda:
            self.rates_there = torch.tensor(self.rates, device=self.task.device)
            for group in self.optimizer.param_groups:
                group["lr"], group["capturable"] = torch.tensor(0.0, device=self.task.device), True
        replays: dict[tuple[int, ...], Callable[[], None]] = {}
        for _ in range(steps):
            present = members()
            key = tuple(id(member) for member in present)
            if key not in replays:
                replays[key] = captured(partial(self.step, present), self.task.device, partial(self.changed, present))
            replays[key]()
        self.done += steps
        self.optimizer.zero_grad(set_to_none=True)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates[-1]
            group["capturable"] = False

    def factor(self, step: int) -> float:
        """Of the rate."""
        warm = max(1, self.steps // 20)
        return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / self.steps)))

    def changed(self, members: Members) -> list[Tensor]:
        """All that a step changes, as far as it is there yet."""
        state = [value for one in self.optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
        buffers = [buffer for member in members for buffer in member.buffers()]
        return [*(parameter.detach() for parameter in self.model.parameters()), *buffers, *state, self.clock]

    def step(self, members: Members) -> None:
        for group in self.optimizer.param_groups:
            if self.on_cuda:
                group["lr"].copy_(self.rates_there.index_select(0, self.clock)[0])
            else:
                group["lr"] = self.rates[int(self.clock)]
        x, y = self.task.taken(self.places.index_select(0, self.clock)[0])
        self.optimizer.zero_grad(set_to_none=True)
        for member in members:
            with precision(self.task.device):
                loss = self.task.loss(member, x, y) / len(members)
            loss.backward()
        self.optimizer.step()
        self.clock.add_(1)
