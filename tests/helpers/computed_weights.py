"""Blocks whose weights are computed from parameters: learned queries, hypernetworks, normalised or transformed weights.

`Computed` is a tensor (rows, width) made of a learned code by steps such as layers, norms, activations, shifts and products. A
block uses it as the queries of attention, or as the weight of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.layer_blocks import ACTIVATIONS


class Beside(nn.Module):
    """A sum or product with a parameter: one value per unit, or one per entry."""

    def __init__(self, how: str, rows: int, width: int) -> None:
        super().__init__()
        self.how = how
        self.p = nn.Parameter(torch.ones(rows, width) if how.endswith("all") else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        match self.how.partition(" ")[0]:
            case "add":
                return x + self.p
            case "scale":
                return x * self.p
            case "scaled":
                return self.p * x
        return x / (1 + self.p.square())


class Pairwise(nn.Module):
    """The product or sum of two linear functions of the code, entry by entry."""

    def __init__(self, how: str, width: int, out: int) -> None:
        super().__init__()
        self.how, self.one, self.other = how, nn.Linear(width, out), nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        return one * other if self.how == "multiply" else one + other if self.how == "sum" else torch.maximum(one, other)


def computing_step(step: Sequence[Any], rows: int, width: int) -> tuple[nn.Module, int]:
    kind, *options = step
    match kind:
        case "linear":
            return nn.Linear(width, options[0], bias=options[1]), options[0]
        case "pairwise":
            return Pairwise(options[0], width, options[1]), options[1]
        case "norm":
            affine = options[0] == "layer"
            return nn.RMSNorm(width, eps=1e-5) if options[0] == "rms" else nn.LayerNorm(width, elementwise_affine=affine), width
        case "activation":
            return ACTIVATIONS[options[0]](), width
    return Beside(options[0], rows, width), width


class Computed(nn.Module):
    """A tensor (rows, width) that depends on no input."""

    def __init__(self, rows: int, code: int, steps: Sequence[Sequence[Any]], width: int | None = None) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(rows, code))
        self.out, layers = code, []
        if width is not None and not any(kind in ("linear", "pairwise") for kind, *_ in steps):
            steps = (("linear", width, True), *steps)
        last = max((place for place, step in enumerate(steps) if step[0] in ("linear", "pairwise")), default=-1)
        for place, step in enumerate(steps):
            if place == last and width is not None:
                step = ("linear", width, step[2]) if step[0] == "linear" else ("pairwise", step[1], width)
            layer, self.out = computing_step(step, rows, self.out)
            layers.append(layer)
        self.steps = nn.Sequential(*layers)

    def forward(self) -> Tensor:
        return self.steps(self.code)


class LearnedQueries(nn.Module):
    """Attention of queries that are computed from a learned code, as in Perceiver's decoder and attention pooling."""

    def __init__(self, width: int, queries: int, code: int, steps: Sequence[Sequence[Any]], out: int, features: bool) -> None:
        super().__init__()
        self.queries = Computed(queries, code, steps)
        self.key, self.value, self.out = nn.Linear(width, self.queries.out), nn.Linear(width, out), out
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        scores = self.queries() @ self.key(x).transpose(1, 2)
        return torch.tanh(scores) @ self.value(x) if self.features else scores.softmax(-1) @ self.value(x)


class ComputedLinear(nn.Module):
    """A layer whose weight (out, in) is computed from a learned code, as hypernetworks do."""

    def __init__(self, width: int, out: int, code: int, steps: Sequence[Sequence[Any]], bias: bool, turned: bool) -> None:
        super().__init__()
        self.turned, self.out = turned, out
        self.made = Computed(width, code, steps, out) if turned else Computed(out, code, steps, width)
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.made()
        return nn.functional.linear(x, weight.t() if self.turned else weight, self.bias)
