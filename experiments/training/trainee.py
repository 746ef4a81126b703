"""A network on its way through a segment, and the curve of what was measured on that way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from experiments.setting.arms import Stage
from experiments.setting.models import SmallConv
from experiments.setting.segments import Segment


@dataclass
class Curve:
    """What a segment measured: an entry before the first step and one per epoch, counted from the segment's own beginning.

    `accuracy` and `test_loss` are those of the test set, `validation_accuracy` and `validation_loss` those of the validation
    set (empty without one). `running_accuracy` and `train_loss` are means over the training batches since the last entry, each
    measured before its own step. `seconds` are the network's share of the time of its fleet.
    """

    epoch: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    validation_accuracy: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)
    running_accuracy: list[float | None] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # losses of the first hundred, unless only the end is evaluated
    last: list[float] = field(default_factory=list)  # losses of the last thirty, likewise
    growth: dict[str, Any] = field(default_factory=dict)
    open: list[float] = field(default_factory=list)  # steps since the last entry; sums of losses, of accuracies, of seconds

    def spend(self, losses: Tensor, right: Tensor, seconds: float) -> None:
        """Some more steps, for the next entry."""
        new = len(losses), float(losses.sum()), float(right.sum()), seconds
        self.open = [one + more for one, more in zip(self.open or (0, 0.0, 0.0, 0.0), new, strict=True)]

    def close(self, epoch: float, evaluated: list[tuple[Any, Any]], flops: float) -> None:
        """An entry for everything that was spent since the last."""
        steps, lost, right, seconds = self.open
        self.open = []
        self.add(epoch, evaluated, (lost / steps, right / steps), flops, self.seconds[-1] + seconds)

    def add(
        self, epoch: float, evaluated: list[tuple[Any, Any]], trained: tuple[Any, Any], flops: float, seconds: float
    ) -> None:
        """An entry. `evaluated`: accuracy and loss of the test set, then of the validation set; `trained`: the means."""
        self.epoch.append(round(epoch, 4))
        for (accuracy, loss), mine in zip(evaluated, ("", "validation"), strict=False):
            accuracies = self.validation_accuracy if mine else self.accuracy
            losses = self.validation_loss if mine else self.test_loss
            accuracies.append(round(float(accuracy), 6))
            losses.append(round(float(loss), 5))
        for value, values in zip(trained, (self.train_loss, self.running_accuracy), strict=True):
            values.append(None if value is None else round(float(value), 5))
        self.flops.append(flops)
        self.seconds.append(round(seconds, 4))


@dataclass(eq=False)
class Trainee:
    """A network on its way through a segment."""

    segment: Segment
    model: nn.Module
    optimizer: torch.optim.Optimizer
    curve: Curve
    done: int = 0  # steps of this segment
    flops: int = 0  # of one step
    filters: dict[str, Tensor] = field(default_factory=dict)  # of a SmallConv's first layer: before and after its growth

    def length(self, per_epoch: int) -> int:
        return round(self.segment.stage.epochs * per_epoch)

    def ahead(self, per_epoch: int) -> int:
        """Steps until its next evaluation, or its end."""
        looks, left = self.segment.stage.looks, self.length(per_epoch) - self.done
        if not looks:
            return left
        every = max(1, per_epoch // looks)
        return min(every - self.done % every, left)

    def rates(self, steps: int, per_epoch: int) -> list[float]:
        """Learning rates of the next steps."""
        return rates_of(self.segment.stages, self.done, steps, per_epoch)

    def add_steps(self, losses: Tensor, right: Tensor, seconds: float) -> None:
        """Steps that were made."""
        self.curve.spend(losses, right, seconds)
        if self.segment.stage.looks:
            self.curve.steps += [round(value, 8) for value in losses[: max(0, 100 - self.done)].tolist()]
            self.curve.last = [*self.curve.last, *(round(value, 8) for value in losses[-30:].tolist())][-30:]
        self.done += len(losses)


def rates_of(stages: Sequence[Stage], done: int, steps: int, per_epoch: int) -> list[float]:
    """Learning rates of the next steps of the last of some stages, in which `done` steps are made.

    Along a cosine over FLOPs a step moves by its FLOPs, counted in steps of the network in whose epochs the span is given.
    """
    stage, before = stages[-1], 0.0
    if not stage.span and not stage.rewarm:
        return [stage.rate] * steps
    for earlier in reversed(stages[:-1]):
        if earlier.span != stage.span:
            break
        before += round(earlier.epochs * per_epoch) * (earlier.takes or 1)
    takes = stage.takes or 1
    length = stage.span * per_epoch if stage.takes else round(stage.span * per_epoch)
    rates = [rate_at(before + step * takes, length, stage.rate, takes) for step in range(done, done + steps)]
    warm = max(1, round(stage.rewarm * per_epoch)) if stage.rewarm else 0
    return [rate * (step + 1) / warm if step < warm else rate for step, rate in enumerate(rates, done)]


def rate_at(step: float, length: float, peak: float, takes: float = 1) -> float:
    """The learning rate at a step of a cosine, which moves along it by `takes`; where its length is zero it stays."""
    if not length:
        return peak
    warm = max(1, length // 20)
    if step < warm:
        return peak * min(1.0, (step + takes) / warm)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, length - warm))))


def optimizer_for(model: nn.Module, segment: Segment) -> torch.optim.Optimizer:
    stage = segment.stage
    if segment.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=stage.rate, weight_decay=stage.decay)
    return torch.optim.Adam(model.parameters(), lr=stage.rate, weight_decay=stage.decay, amsgrad=True)


def filters_of(model: nn.Module, when: str) -> dict[str, Tensor]:
    """The first layer of a SmallConv."""
    return {when: model.conv1.weight.detach().half().clone()} if isinstance(model, SmallConv) else {}
