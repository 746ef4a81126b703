"""y = x · gate · sigmoid(gate) as one operator, with a gradient of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import outgrow


def _swish_gate(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    return x * gate * torch.sigmoid(scale * gate)


swish_gate = torch.library.custom_op("outside::swish_gate", _swish_gate, mutates_args=())
swish_gate.register_fake(lambda x, gate, scale=1.0: torch.empty_like(x))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
    x, gate = ctx.saved_tensors
    open_ = torch.sigmoid(ctx.scale * gate)
    slope = open_ + ctx.scale * gate * open_ * (1 - open_)
    return upstream * gate * open_, upstream * x * slope, None


swish_gate.register_autograd(_backward, setup_context=_remember)


@outgrow.rule("outside::swish_gate")
def reference(x: Tensor, gate: Tensor, scale: float = 1.0) -> Tensor:
    """The same by operators of PyTorch."""
    return x * gate * torch.sigmoid(scale * gate)
