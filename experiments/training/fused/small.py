"""SmallConv for a fleet: the convolution and the pool by kernels, the linear layers by batched products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.training.fused import pooled
from experiments.training.fused.network import FILL, Convolution, power

HIDDEN, CLASSES, SIDE, POOLED = 150, 10, 32, 16
GROUPS, PLACES = 16, 4  # of windows, over which gradients of the first layer are left as partial sums; pixels of a window


class SmallLayout:
    """Where everything of a SmallConv lies: convolution, its bias, two linear layers with theirs."""

    norms = gamma = beta = 0

    def __init__(self, filters: int) -> None:
        self.filters = filters
        self.conv = Convolution(3, filters, 7, 1, SIDE, 0, 0, 0, GROUPS * PLACES)
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
        self.pooled = numbers(layout.inputs, batch)
        self.chosen = torch.zeros(nets, layout.inputs, batch, dtype=torch.int8, device=device)
        self.part = numbers(GROUPS * PLACES, layout.filters)
        self.eye = torch.eye(CLASSES, device=device)

    def _weights(self, number: int, *shape: int) -> Tensor:
        starts = self.layout.starts
        return self.parameters[:, starts[number] : starts[number + 1]].unflatten(1, shape)

    def _gradient(self, number: int, *shape: int) -> Tensor:
        """Where the gradient of a parameter goes."""
        start = self.layout.rest - self.layout.conv.size
        first, end = (start + place for place in self.layout.starts[number : number + 2])
        return self.gradients[:, first:end].unflatten(1, shape)

    def _store(self, number: int, gradient: Tensor) -> None:
        self._gradient(number, *gradient.shape[1:]).copy_(gradient)

    def _sizes(self) -> dict[str, Any]:
        conv = self.layout.conv
        return {"C_IN": 3, "C_OUT": conv.outputs, "H": SIDE, "W": SIDE, "KERNEL": conv.kernel, "PAD": conv.pad, "B": self.batch}

    def forward(self, train: bool) -> None:
        layout = self.layout
        pooled.convolve_and_pool[(POOLED**2, self.nets)](
            self.images, self.streams, self.parameters, self.parameters[:, layout.starts[1] :], self.pooled, self.chosen,
            layout.parameters, **self._sizes(), BM=power(layout.filters, FILL), BK=32, PRECISION=self.precision,
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
        right.index_copy_(1, clock.long(), (logits.argmax(1) == target).float().mean(1, keepdim=True))
        change = (logits.softmax(1) - self.eye.index_select(0, target.flatten()).view(*target.shape, -1).mT) / self.batch
        self._store(5, change.sum(2))
        self._store(4, change @ hidden.mT)
        back = (two.mT @ change) * (hidden > 0)
        self._store(3, back.sum(2))
        torch.bmm(back, self.pooled.mT, out=self._gradient(2, HIDDEN, layout.inputs))
        self.behind = one.mT @ back

    def backward(self) -> None:
        layout, conv = self.layout, self.layout.conv
        taps = conv.inputs * (conv.kernel + 1) ** 2
        pooled.weigh_chosen[(GROUPS, self.nets, -(-taps // 64))](
            self.behind, self.chosen, self.images, self.streams, self.gradients, self.part, layout.gradients, **self._sizes(),
            BM=power(PLACES * layout.filters, FILL), BN=64, BB=min(32, self.batch), GROUPS=GROUPS, PRECISION=self.precision,
        )  # fmt: skip
        self._store(1, self.part.sum(1))
