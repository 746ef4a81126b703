"""One growth of the study: all widths of the network, by outgrow's public calls."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import outgrow
from experiments.widening_steps.arms import Arm
from experiments.widening_steps.network import ResNet20
from experiments.widening_steps.steps import plain_float32

STREAMS = ("conv1", "layer2.0.conv2", "layer3.0.conv2")
Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def inner(model: ResNet20) -> list[str]:
    """The first convolution of each block: its channels are read by the second one alone."""
    return [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3) for block in range(len(model.layer1))]


def widenings(model: ResNet20, method: str, factor: float, batches: Sequence[Batch]) -> list[outgrow.Widen]:
    """The growth as transforms of the library; batches: for values that are learned."""
    plain: dict[str, Any] = {
        "pairs": outgrow.R2R,
        "net2net": lambda: outgrow.Net2Net(split="random"),  # equal parts would stay equal for ever
        "random": outgrow.RandomPad,
        "netmorph": outgrow.NetMorph,
    }
    if method in plain:
        return [outgrow.Widen("*", factor=factor, method=plain[method]())]
    learned = outgrow.GradMax(batches, loss_of) if method == "gradmax" else outgrow.North()
    return [
        outgrow.Widen(inner(model), factor=factor, method=outgrow.R2R(init=learned)),
        outgrow.Widen(STREAMS, factor=factor, method=outgrow.R2R()),
    ]


def grow(
    model: ResNet20, optimizer: torch.optim.Optimizer, arm: Arm, width: int, batches: Sequence[Batch], seed: int
) -> dict[str, Any]:
    """Grow a network and its momenta; what is kept about that with the results."""
    started, before = time.perf_counter(), fan_ins(model)
    model.train()
    with plain_float32():
        requests = widenings(model, arm.method, width / model.conv1.out_channels, batches)
        growth = outgrow.grow(model, batches[0][0][:8], *requests, optimizer=optimizer, seed=seed)
    if arm.rescaled:
        rescale(model, optimizer, before)
    assert growth.preserving == (arm.method != "random"), growth
    sizes = {"width": width, "parameters": growth.parameters[-1]}
    return {**sizes, "error": growth.max_error, "seconds": round(time.perf_counter() - started, 3)}


def layers(model: nn.Module) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Convolutions and the norms behind them, which follow each other in every module of the network."""
    found = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.BatchNorm2d))]
    convolutions = [module for module in found if isinstance(module, nn.Conv2d)]
    norms = [module for module in found if isinstance(module, nn.BatchNorm2d)]
    return list(zip(convolutions, norms, strict=True))


def fan_ins(model: nn.Module) -> list[int]:
    return [convolution.in_channels for convolution, _ in layers(model)]


@torch.no_grad()
def rescale(model: nn.Module, optimizer: torch.optim.Optimizer, before: Sequence[int]) -> None:
    """Variance transfer: weights of convolutions times s = √(inputs before / inputs now), so that sums keep their deviation.

    The norm behind a convolution takes the factor away again if its running statistics and its ε follow. The gradient of such
    weights is 1/s times as large, and so are their momenta. The classifier has no norm behind it and stays as it is.
    """
    for (convolution, norm), inputs in zip(layers(model), before, strict=True):
        s = math.sqrt(inputs / convolution.in_channels)
        convolution.weight.mul_(s)
        optimizer.state[convolution.weight]["momentum_buffer"].div_(s)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.mul_(s)
        norm.running_var.mul_(s * s)
        norm.eps *= s * s  # otherwise channels with a small variance would change
