"""Training: some epochs with flips and crops, the rate on a cosine from its maximum to zero.

On CUDA each step is a replay of one graph, with products in bfloat16: the launches of a step's many small kernels would take
the host longer than they take the device. All that a step needs lies on the device: the table of an epoch's batches, its rates,
and a clock that counts steps. The update is that of torch's SGD with Nesterov's momentum; its momenta are the optimizer's, so
that they are saved, inherited and grown with it.

    g ← g + decay · w;    m ← 0.9 m + g;    w ← w − rate · (g + 0.9 m)

The final training also covers squares and smooths labels, which helps long trainings and harms brief ones.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.search.images import Images
from experiments.training.background import captured
from experiments.widening_steps.steps import laid_out_as

RATE, MOMENTUM, DECAY = 0.2, 0.9, 5e-4
SMOOTHING = 0.1  # of labels in the final training
PIECE = 2_500  # images that are evaluated at once


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, nesterov=True)


class Steps:
    """The steps of one network. final: with covered squares and smoothed labels."""

    def __init__(self, model: nn.Module, optimizer: Any, images: Images, final: bool = False) -> None:
        self.model, self.images, self.final = model.to(memory_format=torch.channels_last), images, final  # type: ignore[call-overload]
        device = images.y.device
        self.on_cuda = device.type == "cuda"
        self.parameters: list[Tensor] = list(model.parameters())
        self.momenta = [momentum_of(optimizer, parameter) for parameter in self.parameters]
        self.table = torch.zeros(images.steps, 6, images.batch, dtype=torch.long, device=device)
        self.rates = torch.zeros(images.steps, device=device)
        self.clock = torch.zeros(1, dtype=torch.long, device=device)
        model.train()
        self.replay = captured(self.step, device, self.changed)

    def changed(self) -> list[Tensor]:
        """All that a step changes."""
        return [*(parameter.detach() for parameter in self.parameters), *self.model.buffers(), *self.momenta, self.clock]

    def epoch(self, seed: int, epoch: int, epochs: int) -> None:
        """One epoch of `epochs` on the cosine; the device may still be at work on it when this returns."""
        self.model.train()
        steps = self.images.steps
        shares = [(epoch + step / steps) / epochs for step in range(steps)]
        self.table.copy_(self.images.table(seed, epoch, covers=self.final))
        self.rates.copy_(torch.tensor([RATE * 0.5 * (1 + math.cos(math.pi * share)) for share in shares]))
        self.clock.zero_()
        for _ in range(steps):
            self.replay()

    def step(self) -> None:
        x, y = self.images.taken(self.table.index_select(0, self.clock)[0])
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.on_cuda else nullcontext():
            outputs = self.model(x)
        loss = F.cross_entropy(outputs.float(), y, label_smoothing=SMOOTHING if self.final else 0.0)
        found = torch.autograd.grad(loss, self.parameters)
        self.update([laid_out_as(p, g) for p, g in zip(self.parameters, found, strict=True)])
        self.clock.add_(1)

    @torch.no_grad()
    def update(self, grads: list[Tensor]) -> None:
        rate = self.rates.index_select(0, self.clock)[0]
        grads = list(torch._foreach_add(grads, self.parameters, alpha=DECAY))
        torch._foreach_mul_(self.momenta, MOMENTUM)
        torch._foreach_add_(self.momenta, grads)
        torch._foreach_add_(grads, self.momenta, alpha=MOMENTUM)
        torch._foreach_mul_(grads, rate)
        torch._foreach_sub_(self.parameters, grads)


def momentum_of(optimizer: Any, parameter: Tensor) -> Tensor:
    """The momentum of a parameter in its memory order; zeros before the first step, which is what torch's first step makes."""
    state = optimizer.state[parameter]
    momentum = state.get("momentum_buffer")
    given = torch.zeros_like(parameter, requires_grad=False) if momentum is None else laid_out_as(parameter, momentum)
    state["momentum_buffer"] = given
    return given


@torch.no_grad()
def error(model: nn.Module, images: Images) -> float:
    """The share of evaluation images that are classified wrongly."""
    model.eval()
    pieces = zip(images.test_x.split(PIECE), images.test_y.split(PIECE), strict=True)
    return float(sum((model(x).argmax(1) != y).sum() for x, y in pieces)) / len(images.test_y)
