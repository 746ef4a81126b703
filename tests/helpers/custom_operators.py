"""Operators of a library of our own, `ruletest`, which outgrow has no rule for."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ruletest::act", mutates_args=())
def act(x: Tensor, slope: float = 0.5) -> Tensor:
    return torch.where(x > 0, x, slope * x)


@act.register_fake
def _(x: Tensor, slope: float = 0.5) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("ruletest::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No fake implementation, and no gradient."""
    return torch.softmax(q @ k.transpose(-2, -1) * 0.3, dim=-1) @ v


@torch.library.custom_op("ruletest::mixed_linear", mutates_args=())
def mixed_linear(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ weight.t() + bias
    return y, y.square().mean(-1)


@torch.library.custom_op("ruletest::double_", mutates_args={"x"})
def double_(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("ruletest::same", mutates_args=())
def same(x: Tensor) -> Tensor:
    return x.clone()


LIBRARY = torch.library.Library("ruletest", "FRAGMENT")
LIBRARY.define("normed(Tensor x, Tensor weight) -> Tensor")
LIBRARY.impl("normed", lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w, "CompositeExplicitAutograd")
LIBRARY.define("parts(Tensor x) -> Tensor")
LIBRARY.impl("parts", lambda x: torch.relu(x) + 1, "CompositeImplicitAutograd")
