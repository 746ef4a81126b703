"""What a step costs: floating-point operations of a real forward and backward pass, as torch counts them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

SAMPLES = 4


def step_flops(model: nn.Module, image: Sequence[int] = (3, 32, 32)) -> tuple[int, int]:
    """FLOPs for one image: of a training step (forward and backward), and of the forward pass alone."""
    model = copy.deepcopy(model).cpu().train()
    x, y = torch.zeros(SAMPLES, *image), torch.zeros(SAMPLES, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = cross_entropy(model(x), y)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    ahead, back = forward.get_total_flops(), backward.get_total_flops()
    return (ahead + back) // SAMPLES, ahead // SAMPLES
