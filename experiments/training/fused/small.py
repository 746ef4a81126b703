"""SmallConv for a fleet: the convolution and the pool by kernels, the linear layers by batched products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.training.fused import backward, forward
from experiments.training.fused.network import FILL, Convolution, power

HIDDEN, CLASSES, SIDE, POOLED = 150, 10, 32, 16


class SmallLayout:
    """Where everything of a SmallConv lies: convolution, its bias, two linear layers with theirs."""

    norms = gamma = beta = 0

    def __init__(self, filters: int) -> None:
        self.filters = filters
        self.conv = Convolution(3, filters, 7, 1, SIDE, 0, 0, 0, 16)
        self.inputs = filters * POOLED**2
        sizes = [self.conv.size, filters, HIDDEN * self.inputs, HIDDEN, CLASSES * HIDDEN, CLASSES]
        self.starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.parameters = self.starts[-1]
        self.rest = self.conv.size * self.conv.groups  # where gradients begin that have one part only
        self.gradients = self.rest + self.parameters - self.conv.size

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        base = torch.arange(self.parameters, dtype=torch.int32)
        stride, count = torch.zeros_like(base), torch.ones_like(base)
        stride[: self.conv.size], count[: self.conv.size] = self.conv.size, self.conv.groups
        base[self.conv.size :] += self.rest - self.conv.size
        return base, stride, count


class SmallNetwork:
    """The kernels of one step, as `network.Network` has them for ResNetCifar."""

    def __init__(self, layout: SmallLayout, nets: int, streams: int, batch: int, device: Any, precision: str = "tf32") -> None:
        self.layout, self.nets, self.batch, self.precision = layout, nets, batch, precision

        def numbers(*size: int) -> Tensor:
            return torch.zeros(nets, *size, device=device)

        self.parameters, self.gradients = numbers(layout.parameters), numbers(layout.gradients)
        self.running_mean, self.running_var, self.scale, self.shift = (numbers(0) for _ in range(4))
        self.images = torch.zeros(streams, 3, SIDE, SIDE, batch, device=device)
        self.labels = torch.zeros(streams, batch, dtype=torch.int64, device=device)
        self.streams = torch.zeros(nets, dtype=torch.int32, device=device)
        self.output, self.before = (numbers(layout.filters, SIDE, SIDE, batch) for _ in range(2))
        self.pooled = numbers(layout.inputs, batch)
        self.chosen = torch.zeros(nets, layout.inputs, batch, dtype=torch.int8, device=device)
        self.part = numbers(SIDE**2, 2, layout.filters)
        self.eye = torch.eye(CLASSES, device=device)

    def _weights(self, number: int, *shape: int) -> Tensor:
        starts = self.layout.starts
        return self.parameters[:, starts[number] : starts[number + 1]].unflatten(1, shape)

    def _store(self, number: int, gradient: Tensor) -> None:
        start = self.layout.rest - self.layout.conv.size + self.layout.starts[number]
        gradient = gradient.flatten(1)
        self.gradients[:, start : start + gradient.shape[1]] = gradient

    def forward(self, train: bool) -> None:
        layout, conv = self.layout, self.layout.conv
        tile = 2 if conv.outputs <= 16 else 1
        forward.convolve[(SIDE**2 // tile, self.nets)](
            self.images, self.streams, self.parameters, self.parameters[:, layout.starts[1] :], self.output, self.scale,
            self.shift, self.part, layout.parameters, 0, **conv.sizes(), B=self.batch, BM=power(tile * conv.outputs, FILL),
            BK=32, TILE=tile, STREAMS=True, NORMED=False, STATISTICS=False, BIAS=True, PRECISION=self.precision, num_stages=1,
        )  # fmt: skip
        forward.pool[(POOLED**2, self.nets)](
            self.output, self.scale, self.shift, self.pooled, self.chosen, 0, conv.outputs, SIDE, SIDE, POOLED, POOLED, 2, 2, 0,
            self.batch, power(conv.outputs, FILL), False,
        )  # fmt: skip

    def head(self, train: bool, steps: int, clock: Tensor, losses: Tensor, right: Tensor, valid: Tensor) -> None:
        layout = self.layout
        one, two = self._weights(2, HIDDEN, layout.inputs), self._weights(4, CLASSES, HIDDEN)
        hidden = torch.baddbmm(self._weights(3, HIDDEN, 1), one, self.pooled).relu_()
        logits = torch.baddbmm(self._weights(5, CLASSES, 1), two, hidden)  # (net, class, sample)
        target = self.labels.index_select(0, self.streams.long())  # (net, sample)
        lost = logits.logsumexp(1) - logits.gather(1, target[:, None])[:, 0]
        if not train:
            counts = valid.view(-1, self.batch).index_select(0, clock.long())
            losses += (lost * counts).sum(1)
            right += ((logits.argmax(1) == target) * counts).sum(1)
            return
        losses.index_copy_(1, clock.long(), lost.mean(1, keepdim=True))
        change = (logits.softmax(1) - self.eye.index_select(0, target.flatten()).view(*target.shape, -1).mT) / self.batch
        self._store(5, change.sum(2))
        self._store(4, change @ hidden.mT)
        back = (two.mT @ change) * (hidden > 0)
        self._store(3, back.sum(2))
        self._store(2, back @ self.pooled.mT)
        self.behind = one.mT @ back

    def backward(self) -> None:
        layout, conv = self.layout, self.layout.conv
        backward.unpool[(SIDE**2, self.nets)](
            self.behind, self.chosen, self.output, self.scale, self.shift, self.before, self.part, 0, conv.outputs, SIDE, SIDE,
            POOLED, POOLED, 2, 2, 0, self.batch, power(conv.outputs, FILL), False,
        )  # fmt: skip
        self._store(1, self.part[:, :, 0].sum(1))
        backward.weigh[(conv.groups, self.nets, 3)](
            self.before, self.output, self.scale, self.scale, self.scale, self.images, self.streams, self.scale, self.shift,
            self.gradients, 0, layout.gradients, **conv.sizes(), B=self.batch, BM=power(conv.outputs, FILL), BN=64,
            BB=min(64, self.batch), GROUP=SIDE**2 // conv.groups, STREAMS=True, NORMED=False, DIRECT=True,
            PRECISION=self.precision,
        )  # fmt: skip
