"""The plain loop: one network after the other, torch's own modules and optimizers, no tricks; the fused engine's reference.

It has the same interface as `fused.fleet.Fleet`: networks and optimizers come in, `begin` says what to do, `run` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outgrow


def shape_of(model: nn.Module) -> str:
    """What models must share to be trained together: here nothing depends on it but the order of work."""
    return str([tuple(parameter.shape) for parameter in model.parameters()])


class Eager:
    piece = 1_000  # images that are evaluated at once

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        streams: Sequence[int],
        batch: int,
        device: Any = "cpu",
        factors: Sequence[float] = (),
        fades: Sequence[tuple[int, int]] = (),  # outgrow's own gates are at work here
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        self.models, self.optimizers, self.streams = list(models), list(optimizers), list(streams)
        self.batch, self.device, self.loss = batch, device, loss
        for model, optimizer in zip(models, optimizers, strict=True):
            model.to(device)
            move(optimizer, device)
        paced = zip(self.models, self.optimizers, factors, strict=True) if factors else ()
        self.paces = [pace_of(model, optimizer, factor) for model, optimizer, factor in paced if factor != 1]

    def feed(self, images: Tensor, labels: Tensor, mean: Tensor, deviation: Tensor) -> None:
        self.images, self.labels = images.to(self.device), labels.to(self.device)
        self.mean, self.deviation = (values.to(self.device)[:, None, None] for values in (mean, deviation))

    def examine(self, *sets: tuple[Tensor, Tensor]) -> None:
        self.sets = [(images.to(self.device), labels.to(self.device)) for images, labels in sets]

    def begin(self, order: Tensor, rates: Tensor, decays: Tensor, flips: Tensor | None = None) -> None:
        """Get ready for some steps. `order`: (stream, step, sample); `rates`, `decays`: (network, step)."""
        self.order, self.rates, self.decays = order.to(self.device), rates, decays
        self.flips = None if flips is None else flips.to(self.device)

    def prepared(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.deviation

    def run(self) -> tuple[Tensor, Tensor]:
        """All prepared steps: the loss of each batch and the share of it that was classified correctly, (network, step)."""
        losses, right = (torch.zeros(len(self.models), self.order.shape[1], device=self.device) for _ in range(2))
        for number, (model, optimizer, stream) in enumerate(zip(self.models, self.optimizers, self.streams, strict=True)):
            model.train()
            for step, chosen in enumerate(self.order[stream]):
                x = self.prepared(self.images[chosen])
                if self.flips is not None:
                    x = torch.where(self.flips[stream, step].bool()[:, None, None, None], x.flip(3), x)
                for group in optimizer.param_groups:
                    group["lr"], group["weight_decay"] = float(self.rates[number, step]), float(self.decays[number, step])
                logits, target = model(x), self.labels[chosen]
                loss = self.loss(logits, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[number, step] = loss.detach()
                right[number, step] = (logits.argmax(1) == target).float().mean()
        return losses, right

    def start(self, evaluate: bool) -> None:
        """Nothing works in the background here: `finish` makes the prepared steps."""
        self.evaluating = evaluate

    def ready(self) -> bool:
        return True

    def finish(self) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Losses and accuracies of the prepared steps, and what `evaluate` finds after them, if it was wanted."""
        losses, right = self.run()
        return losses.cpu(), right.cpu(), self.evaluate() if self.evaluating else []

    @torch.no_grad()
    def evaluate(self) -> list[tuple[Tensor, Tensor]]:
        """For each set of `examine`: accuracy and mean loss of each network, with running statistics."""
        return [self._evaluate(images, labels) for images, labels in self.sets]

    def _evaluate(self, all_images: Tensor, all_labels: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for model in self.models:
            model.eval()
            right, lost = 0.0, 0.0
            for images, labels in zip(all_images.split(self.piece), all_labels.split(self.piece), strict=True):
                logits = model(self.prepared(images))
                right += float((logits.argmax(1) == labels).sum())
                lost += float(self.loss(logits, labels)) * len(labels)
            results.append((right / len(all_labels), lost / len(all_labels)))
        accuracy, loss = torch.tensor(results).T
        return accuracy, loss

    def land(self) -> None:
        """Back to the host, where growths are made."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.cpu()
            move(optimizer, "cpu")
        for pace in self.paces:
            pace.remove()


def pace_of(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float) -> outgrow.Pace:
    """Let what came with the last growth learn faster, or slower."""
    pace = outgrow.Pace(model, optimizer)
    pace.set({outgrow.cohorts(model).count: factor})
    return pace


def move(optimizer: torch.optim.Optimizer, device: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)
