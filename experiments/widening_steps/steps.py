"""The steps of one network, on CUDA as a graph; graphs of several networks share the device, each on a stream of its own.

SGD with momentum and weight decay as in torch, and a factor on the update of every entry where there are rates per cohort:

    m ← 0.9 m + g + decay · w;    w ← w − rate · factor ∘ m
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.training.background import captured
from experiments.widening_steps.arms import Setting
from experiments.widening_steps.cohort_rates import CohortRates
from experiments.widening_steps.images import Images

PIECE = 2_000  # images that are tested at once


@dataclass(frozen=True)
class Computing:
    """Where and how networks are trained. precision: "tf32" or "bf16" of products on CUDA; layout: of images and weights."""

    device: str = "cpu"
    precision: str = "tf32"
    layout: str = "last"
    compiled: bool = False  # by torch.compile, for steps alone

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def products(self) -> str:
        """The precision of products."""
        return self.precision if self.on_cuda else "float32"

    @property
    def format(self) -> torch.memory_format:
        return torch.channels_last if self.layout == "last" else torch.contiguous_format

    def autocast(self) -> Any:
        use = self.on_cuda and self.precision == "bf16"
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if use else nullcontext()

    def streams(self, number: int) -> list[Any]:
        """A stream for each of so many networks."""
        return [torch.cuda.Stream(self.device) if self.on_cuda else None for _ in range(number)]

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def epoch(self, fleet: Sequence[Steps], streams: Sequence[Any]) -> float:
        """All prepared steps of these networks, a step of each in turn; the seconds that they took."""
        self.wait()
        started = time.perf_counter()
        for _ in range(fleet[0].per_epoch):
            for one, stream in zip(fleet, streams, strict=False):
                with torch.cuda.stream(stream):  # None: no other stream than now
                    one.replay()
        self.wait()
        return time.perf_counter() - started


def sgd(model: nn.Module, setting: Setting) -> torch.optim.SGD:
    """The optimizer, whose momenta are there from the beginning."""
    made = torch.optim.SGD(model.parameters(), setting.rate, setting.momentum, weight_decay=setting.decay)
    for parameter in model.parameters():
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return made


class Steps:
    """The steps of one network at its present size."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.SGD, images: Images, setting: Setting, how: Computing, rates: bool
    ) -> None:
        self.model, self.images, self.setting, self.how = model, images, setting, how
        self.network = torch.compile(model, dynamic=False) if how.compiled else model
        self.per_epoch = len(images.labels) // setting.batch
        model.to(memory_format=how.format)  # type: ignore[call-overload]
        self.parameters: list[Tensor] = list(model.parameters())
        for p in self.parameters:
            optimizer.state[p]["momentum_buffer"] = laid_out_as(p, optimizer.state[p]["momentum_buffer"])
        self.momenta = [optimizer.state[p]["momentum_buffer"] for p in self.parameters]
        self.cohort_rates = CohortRates(model) if rates else None
        self.factors = list(self.cohort_rates.factors.values()) if self.cohort_rates else []
        self.table = torch.zeros(self.per_epoch, 4, setting.batch, dtype=torch.long, device=how.device)
        self.rates = torch.zeros(self.per_epoch, device=how.device)
        self.clock = torch.zeros(1, dtype=torch.long, device=how.device)
        self.lost = torch.zeros((), device=how.device)  # sum of the losses of an epoch
        model.train()
        self.replay = captured(self.step, how.device, self.changed)

    def changed(self) -> list[Tensor]:
        """All that a step changes."""
        parameters = [parameter.detach() for parameter in self.parameters]
        return [*parameters, *self.model.buffers(), *self.momenta, self.clock, self.lost]

    def begin(self, table: Tensor, rates: Tensor) -> None:
        """Get ready for an epoch."""
        self.model.train()
        self.table.copy_(table)
        self.rates.copy_(rates)
        self.clock.zero_()
        self.lost.zero_()
        if self.cohort_rates is not None:
            self.cohort_rates.update()

    def step(self) -> None:
        x, target = self.images.batch(self.table.index_select(0, self.clock)[0])
        with self.how.autocast():
            logits = self.network(x.contiguous(memory_format=self.how.format))
        loss = cross_entropy(logits.float(), target)
        grads = torch.autograd.grad(loss, self.parameters)
        self.update([laid_out_as(p, g) for p, g in zip(self.parameters, grads, strict=True)])
        self.lost.add_(loss.detach())
        self.clock.add_(1)

    @torch.no_grad()
    def update(self, grads: list[Tensor]) -> None:
        rate = self.rates.index_select(0, self.clock)[0]
        torch._foreach_add_(grads, self.parameters, alpha=self.setting.decay)
        torch._foreach_mul_(self.momenta, self.setting.momentum)
        torch._foreach_add_(self.momenta, grads)
        moves = torch._foreach_mul(self.momenta, self.factors) if self.factors else self.momenta
        torch._foreach_sub_(self.parameters, torch._foreach_mul(moves, rate))


def laid_out_as(model: Tensor, values: Tensor) -> Tensor:
    """Values in the memory order of another tensor; operations on lists of tensors are slow where these differ."""
    if values.stride() == model.stride():
        return values
    return torch.empty_like(model, requires_grad=False).copy_(values)


@contextmanager
def plain_float32() -> Iterator[None]:
    """No TF32: it would hide whether a growth is exact."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@torch.no_grad()
def accuracy_and_loss(model: nn.Module, images: Images) -> tuple[float, float]:
    """Accuracy and loss on the test images, in float32."""
    model.eval()
    right, lost = torch.zeros(2, device=images.test.device)
    with plain_float32():
        for x, target in zip(images.test.split(PIECE), images.test_labels.split(PIECE), strict=True):
            logits = model(x)
            right += (logits.argmax(1) == target).sum()
            lost += cross_entropy(logits, target, reduction="sum")
    return round(float(right) / len(images.test_labels), 6), float(lost) / len(images.test_labels)
