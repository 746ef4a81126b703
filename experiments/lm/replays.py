"""The steps of a leg as one CUDA graph: what a step launches takes the host longer than it takes the device.

Everything that a step needs lies on the device: where its batch begins in the text, its rate, and a clock that counts steps.
Without CUDA the same steps are made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from experiments.training.background import captured

Gradients = Callable[[Tensor], Tensor]  # the loss of the batch that begins at these places; gradients are left in the model


class Replays:
    """Steps with AdamW, of which each replay makes the next one. `starts`: (step, sample); `rates`: of each step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: Gradients,
        starts: Tensor,
        rates: Sequence[float],
    ) -> None:
        self.model, self.optimizers, self.gradients, self.starts = model, optimizers, gradients, starts
        self.device = starts.device
        self.rates = torch.tensor(rates, device=self.device)
        self.losses = torch.zeros(len(rates), device=self.device)
        self.clock = torch.zeros(1, dtype=torch.long, device=self.device)
        self.groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in self.groups:
            group["lr"], group["capturable"] = torch.tensor(0.0, device=self.device), self.device.type == "cuda"
        self.replay = captured(self.step, self.device, self.changed)

    def changed(self) -> list[Tensor]:
        """All that a step changes, as far as it is there yet."""
        states = [value for one in self.optimizers for state in one.state.values() for value in state.values()]
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        return [*tensors, *(value for value in states if isinstance(value, Tensor)), self.losses, self.clock]

    def step(self) -> None:
        rate = self.rates.index_select(0, self.clock)[0]
        for group in self.groups:
            group["lr"].copy_(rate)
        self.model.zero_grad(set_to_none=True)
        loss = self.gradients(self.starts.index_select(0, self.clock)[0])
        update(self.model, self.optimizers)
        self.losses.index_copy_(0, self.clock, loss.detach()[None].float())
        self.clock.add_(1)

    def end(self) -> Tensor:
        """The losses of all steps. Optimizers are as others expect them again."""
        for group in self.groups:
            group["lr"], group["capturable"] = float(group["lr"]), False
        self.model.zero_grad(set_to_none=True)
        return self.losses


def update(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """The step of the optimizers with clipped gradients."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
