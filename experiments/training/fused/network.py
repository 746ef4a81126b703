"""ResNetCifar as a sequence of kernels, for all networks of a fleet at once: buffers, the way forward and the way back.

All parameters of a network lie in one row: convolutions as `(out, row, column, in)`, the linear layer, then γ of all norms,
then β. Gradients lie in a row of partial sums; for each parameter three tables say where its parts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.training.fused import backward, forward

EPSILON, MOMENTUM = 1e-5, 0.1
FILL = 16


def power(number: int, least: int = 16) -> int:
    """The next power of two."""
    return max(least, 1 << (number - 1).bit_length())


@dataclass(frozen=True)
class Shape:
    """What networks must share to be trained together."""

    first: int
    second: int
    blocks: tuple[int, int]
    residual: bool


@dataclass(frozen=True)
class Convolution:
    """One layer: its sizes, and where its numbers begin in the rows of a network."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    side: int  # of its input
    weight: int
    norm: int  # first channel among those of all norms
    gradient: int
    groups: int

    @property
    def pad(self) -> int:
        return self.kernel // 2

    @property
    def out(self) -> int:
        return self.side // self.stride

    @property
    def size(self) -> int:
        return self.outputs * self.inputs * self.kernel**2

    def sizes(self) -> dict[str, Any]:
        return {
            "C_IN": self.inputs,
            "C_OUT": self.outputs,
            "H": self.side,
            "W": self.side,
            "OH": self.out,
            "OW": self.out,
            "KERNEL": self.kernel,
            "STRIDE": self.stride,
            "PAD": self.pad,
        }


@dataclass(frozen=True)
class Unit:
    """A block: two layers, and one on its skip where the size changes."""

    one: Convolution
    two: Convolution
    skip: Convolution | None


@dataclass
class Layout:
    """Where everything of a network of some shape lies."""

    shape: Shape
    classes: int = 10
    layers: list[Convolution] = field(default_factory=list)
    weights: int = 0
    norms: int = 0
    partial: int = 0

    def __post_init__(self) -> None:
        first, second = self.shape.first, self.shape.second
        self.stem = self._layer(3, first, 7, 2, 32)
        self.units = []
        for stage, (width, count) in enumerate(zip((first, second), self.shape.blocks, strict=True)):
            for number in range(count):
                change = stage == 1 and number == 0
                before, stride, side = (first, 2, 8) if change else (width, 1, (8, 4)[stage])
                one = self._layer(before, width, 3, stride, side)
                two = self._layer(width, width, 3, 1, side // stride)
                skip = self._layer(before, width, 1, stride, side) if change and self.shape.residual else None
                self.units.append(Unit(one, two, skip))
        self.fc = self.weights
        self.fc_bias = self.fc + second * self.classes
        self.gamma = self.fc_bias + self.classes
        self.parameters = self.gamma + 2 * self.norms
        self.d_fc = self.partial
        self.d_gamma = self.d_fc + (second + 1) * self.classes
        self.d_beta = self.d_gamma + self.norms
        self.gradients = self.d_beta + self.norms

    def _layer(self, inputs: int, outputs: int, kernel: int, stride: int, side: int) -> Convolution:
        pixels = (side // stride) ** 2
        layer = Convolution(inputs, outputs, kernel, stride, side, self.weights, self.norms, self.partial, min(pixels, 16))
        self.weights += layer.size
        self.norms += outputs
        self.partial += layer.size * layer.groups
        self.layers.append(layer)
        return layer

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each parameter: where its first partial sum is, how far apart they are, and how many there are."""
        base = torch.empty(self.parameters, dtype=torch.int32)
        stride, count = torch.zeros_like(base), torch.ones_like(base)
        for layer in self.layers:
            at = slice(layer.weight, layer.weight + layer.size)
            base[at] = layer.gradient + torch.arange(layer.size, dtype=torch.int32)
            stride[at], count[at] = layer.size, layer.groups
        base[self.fc :] = self.d_fc + torch.arange(self.parameters - self.fc, dtype=torch.int32)
        return base, stride, count


class Network:
    """The kernels of one step for a fleet of networks, which share a layout."""

    def __init__(self, layout: Layout, nets: int, streams: int, batch: int, device: Any, precision: str = "tf32") -> None:
        self.layout, self.nets, self.batch, self.precision = layout, nets, batch, precision

        def numbers(*size: int) -> Tensor:
            return torch.zeros(nets, *size, device=device)

        self.parameters = numbers(layout.parameters)
        self.gradients = numbers(layout.gradients)
        self.running_mean, self.running_var = numbers(layout.norms), numbers(layout.norms)
        self.mean, self.rstd, self.scale, self.shift = (numbers(layout.norms) for _ in range(4))
        self.c1, self.c2, self.c3 = (numbers(layout.norms) for _ in range(3))
        self.images = torch.zeros(streams, 3, 32, 32, batch, device=device)
        self.labels = torch.zeros(streams, batch, dtype=torch.int64, device=device)
        self.streams = torch.zeros(nets, dtype=torch.int32, device=device)
        self.outputs = {layer.weight: numbers(layer.outputs, layer.out, layer.out, batch) for layer in layout.layers}
        self.ends = [numbers(unit.two.outputs, unit.two.out, unit.two.out, batch) for unit in layout.units]
        self.pooled = numbers(layout.shape.first, 8, 8, batch)
        self.chosen = torch.zeros(nets, layout.shape.first, 8, 8, batch, dtype=torch.int8, device=device)
        widest = [layer.outputs * layer.out**2 for layer in layout.layers[1:]] + [layout.shape.first * 64]
        self.work = [numbers(max(widest), batch) for _ in range(4)]
        self.before = torch.zeros_like(self.outputs[layout.stem.weight])
        self.gates: Tensor | None = None  # (net, channel of a norm): what is left through of it
        self.part = numbers(256, 2, layout.shape.second)
        self.skip_part = numbers(16, 2, layout.shape.second)

    def affine(self) -> Tensor:
        """γ and β of all norms, (net, 2, channel), as far as gates let them through."""
        layout = self.layout
        values = self.parameters[:, layout.gamma :].unflatten(1, (2, layout.norms))
        return values if self.gates is None else values * self.gates[:, None]

    def forward(self, train: bool) -> None:
        """As far as the end of the last block."""
        layout, stem = self.layout, self.layout.stem
        self.through = self.affine()
        self._convolve(stem, self.images, train)
        forward.pool[(64, self.nets)](
            self.outputs[stem.weight], self.scale[:, stem.norm :], self.shift[:, stem.norm :], self.pooled, self.chosen,
            layout.norms, stem.outputs, 16, 16, 8, 8, 3, 2, 1, self.batch, power(stem.outputs, FILL), True,
        )  # fmt: skip
        x = self.pooled
        for unit, end in zip(layout.units, self.ends, strict=True):
            self._convolve(unit.one, x, train)
            self._convolve(unit.two, self.outputs[unit.one.weight], train, normed=unit.one)
            if unit.skip is not None:
                self._convolve(unit.skip, x, train)
            self._join(unit, x, end)
            x = end

    def head(self, train: bool, steps: int, clock: Tensor, losses: Tensor, right: Tensor, valid: Tensor) -> None:
        """The linear layer and the loss; in training also their gradients, as far as the end of the last block (`work[0]`)."""
        layout = self.layout
        forward.classify[(self.nets,)](
            self.ends[-1], self.streams, self.labels, self.parameters[:, layout.fc :], self.parameters[:, layout.fc_bias :],
            clock, losses, right, self.work[0], self.gradients[:, layout.d_fc :],
            self.gradients[:, layout.d_fc + layout.shape.second * layout.classes :], valid, layout.parameters, layout.gradients,
            steps, layout.shape.second, 16, layout.classes, self.batch, power(layout.shape.second, FILL), 16, train,
        )  # fmt: skip

    def backward(self) -> None:
        """From `work[0]` to all partial sums of gradients."""
        layout = self.layout
        first, second = self.work[0], None
        for number in reversed(range(len(layout.units))):
            unit, x = layout.units[number], self.ends[number - 1] if number else self.pooled
            g, down = [buffer for buffer in self.work if buffer is not first and buffer is not second][:2]
            self._part(unit, first, second, self.ends[number], g)
            inner = first  # has been read
            self._norm_gradient(unit.two, self.part)
            self._back(unit.two, g, inner, normed=unit.one)
            self._weigh(unit.two, g, self.outputs[unit.one.weight], normed=unit.one)
            self._norm_gradient(unit.one, self.part)
            self._weigh(unit.one, inner, x)
            self._back(unit.one, inner, down)
            first, second = down, g if layout.shape.residual else None
            if unit.skip is not None:
                self._norm_gradient(unit.skip, self.skip_part)
                self._weigh(unit.skip, g, x)
                self._back(unit.skip, g, inner)
                second = inner
        self._stem_back(first, second)
        if self.gates is not None:
            self.gradients[:, layout.d_gamma :].unflatten(1, (2, layout.norms)).mul_(self.gates[:, None])

    def _convolve(self, layer: Convolution, x: Tensor, train: bool, normed: Convolution | None = None) -> None:
        at = 0 if normed is None else normed.norm
        tile = 2 if layer.out > 4 else 1
        forward.convolve[(layer.out**2 // tile, self.nets)](
            x, self.streams, self.parameters[:, layer.weight :], self.parameters, self.outputs[layer.weight],
            self.scale[:, at:], self.shift[:, at:], self.part, self.layout.parameters, self.layout.norms,
            **layer.sizes(), B=self.batch, BM=power(tile * layer.outputs, FILL), BK=32, TILE=tile,
            STREAMS=layer is self.layout.stem, NORMED=normed is not None, STATISTICS=train, BIAS=False,
            PRECISION=self.precision, num_stages=1,
        )  # fmt: skip
        if train:
            at, layout = layer.norm, self.layout
            forward.statistics[(self.nets,)](
                self.part, self.through[:, 0, at:], self.through[:, 1, at:], self.mean[:, at:],
                self.rstd[:, at:], self.scale[:, at:], self.shift[:, at:], self.running_mean[:, at:], self.running_var[:, at:],
                self.through.stride(0), layout.norms, MOMENTUM, EPSILON, layer.outputs, layer.out**2, self.batch,
                power(layer.outputs, FILL), power(layer.out**2),
            )  # fmt: skip

    def _join(self, unit: Unit, x: Tensor, end: Tensor) -> None:
        two, skip = unit.two, unit.skip
        kind, other, at = (0, x, 0) if not self.layout.shape.residual else (1, x, 0)
        if skip is not None:
            kind, other, at = 2, self.outputs[skip.weight], skip.norm
        forward.join[(two.out**2, self.nets)](
            self.outputs[two.weight], self.scale[:, two.norm :], self.shift[:, two.norm :], other, self.scale[:, at:],
            self.shift[:, at:], end, self.layout.norms, two.outputs, two.out**2, self.batch, power(two.outputs, FILL), kind,
        )  # fmt: skip

    def _part(self, unit: Unit, first: Tensor, second: Tensor | None, end: Tensor, g: Tensor) -> None:
        two, skip = unit.two, unit.skip
        at = 0 if skip is None else skip.norm
        other = self.outputs[two.weight] if skip is None else self.outputs[skip.weight]
        backward.part_gradient[(two.out**2, self.nets)](
            first, first if second is None else second, end, self.outputs[two.weight], self.mean[:, two.norm :],
            self.rstd[:, two.norm :], g, self.part, other, self.mean[:, at:], self.rstd[:, at:], self.skip_part,
            self.layout.norms, two.outputs, two.out**2, self.batch, power(two.outputs, FILL), second is not None,
            skip is not None,
        )  # fmt: skip

    def _norm_gradient(self, layer: Convolution, part: Tensor) -> None:
        at, layout = layer.norm, self.layout
        backward.norm_gradient[(self.nets,)](
            part, self.mean[:, at:], self.rstd[:, at:], self.scale[:, at:], self.c1[:, at:], self.c2[:, at:], self.c3[:, at:],
            self.gradients[:, layout.d_gamma + at :], self.gradients[:, layout.d_beta + at :], layout.norms, layout.gradients,
            layer.outputs, layer.out**2, self.batch, power(layer.outputs, FILL), power(layer.out**2),
        )  # fmt: skip

    def _back(self, layer: Convolution, g: Tensor, out: Tensor, normed: Convolution | None = None) -> None:
        at, before = layer.norm, 0 if normed is None else normed.norm
        tile = 2 if layer.side > 4 else 1
        backward.convolve_back[(layer.side**2 // tile, self.nets)](
            g, self.outputs[layer.weight], self.c1[:, at:], self.c2[:, at:], self.c3[:, at:], self.parameters[:,
            layer.weight :], out, g if normed is None else self.outputs[normed.weight], self.scale[:, before:], self.shift[:,
            before:], self.mean[:, before:], self.rstd[:, before:], self.part, self.layout.parameters, self.layout.norms,
            **layer.sizes(), B=self.batch, BM=power(tile * layer.inputs, FILL), BK=16, TILE=tile, NORMED=normed is not None,
            PRECISION=self.precision,
        )  # fmt: skip

    def _weigh(self, layer: Convolution, g: Tensor, x: Tensor, normed: Convolution | None = None) -> None:
        at, before = layer.norm, 0 if normed is None else normed.norm
        width = layer.inputs * layer.kernel**2
        block = 64 if layer is self.layout.stem else min(128, power(width))
        backward.weigh[(layer.groups, self.nets, -(-width // block))](
            g, self.outputs[layer.weight], self.c1[:, at:], self.c2[:, at:], self.c3[:, at:], x, self.streams,
            self.scale[:, before:], self.shift[:, before:], self.gradients[:, layer.gradient :], self.layout.norms,
            self.layout.gradients, **layer.sizes(), B=self.batch, BM=power(layer.outputs, FILL), BN=block,
            BB=min(64 if layer is self.layout.stem else 32, self.batch), GROUP=layer.out**2 // layer.groups,
            STREAMS=layer is self.layout.stem, NORMED=normed is not None, DIRECT=False, PRECISION=self.precision,
        )  # fmt: skip

    def _stem_back(self, first: Tensor, second: Tensor | None) -> None:
        stem, layout = self.layout.stem, self.layout
        if second is not None:
            first.add_(second)
        backward.unpool[(256, self.nets)](
            first, self.chosen, self.outputs[stem.weight], self.mean[:, stem.norm :], self.rstd[:, stem.norm :],
            self.before, self.part, layout.norms, stem.outputs, 16, 16, 8, 8, 3, 2, 1, self.batch, power(stem.outputs, FILL),
            True,
        )  # fmt: skip
        self._norm_gradient(stem, self.part)
        self._weigh(stem, self.before, self.images)
