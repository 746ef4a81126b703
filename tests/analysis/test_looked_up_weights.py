"""Stacks of weights from which data chooses one per row: products with them read units as layers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import outgrow
from tests.helpers.judging import assert_same_function

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # stack (experts, out, in), chosen (rows), x (rows, in)


def _twice(weights: Tensor, x: Tensor) -> Tensor:
    return (weights @ x + weights @ x.abs()).squeeze(-1)


PRODUCTS: dict[str, Product] = {
    "bmm": lambda stack, chosen, x: torch.bmm(stack[chosen], x.unsqueeze(-1)).squeeze(-1),
    "rows first": lambda stack, chosen, x: (x.unsqueeze(1) @ stack[chosen].transpose(1, 2)).squeeze(1),
    "index_select": lambda stack, chosen, x: torch.einsum("si,soi->so", x, stack.index_select(0, chosen)),
    "twice": lambda stack, chosen, x: _twice(stack[chosen], x.unsqueeze(-1)),
}


class Mixture(nn.Module):
    """Each row takes the expert that the sign of its first feature names; `also` is one more use of the looked-up weights."""

    def __init__(self, product: Product, also: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.product, self.also = product, also
        self.write = nn.Parameter(torch.randn(2, 8, 6))
        self.bias = nn.Parameter(torch.randn(2, 8))
        self.read = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        hidden = torch.tanh(self.product(self.write, chosen, x) + self.bias[chosen])
        result = self.product(self.read, chosen, hidden)
        return result if self.also is None else result + self.also(self.read[chosen])


def mixture(product: Product, also: Callable[[Tensor], Tensor] | None = None) -> Mixture:
    torch.manual_seed(0)
    return Mixture(product, also).double()


@pytest.mark.parametrize("method", ["r2r", "net2net", "netmorph", "mean"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_hidden_units_of_experts_grow_exactly(name: str, method: str) -> None:
    model, twin, x = mixture(PRODUCTS[name]), mixture(PRODUCTS[name]), torch.randn(9, 6, dtype=torch.float64)
    outgrow.widen(model, x, "write", to=12, method=method)
    assert (model.write.shape, model.bias.shape, model.read.shape) == ((2, 12, 6), (2, 12), (2, 4, 12))
    assert bool(model.write[:, 8:].abs().amax((1, 2)).min() > 0)  # the new units of both experts compute something
    assert_same_function(twin, model, [x, torch.randn(7, 6, dtype=torch.float64)])


@pytest.mark.parametrize(
    "also", [lambda weights: weights.sum((1, 2))[:, None], lambda weights: (weights @ weights.mT).sum(2)], ids=["sum", "square"]
)
def test_other_uses_of_looked_up_weights_are_still_refused(also: Callable[[Tensor], Tensor]) -> None:
    model, x = mixture(PRODUCTS["bmm"], also), torch.randn(9, 6, dtype=torch.float64)
    with pytest.raises(outgrow.GrowthError):
        outgrow.widen(model, x, "write", to=12, method="r2r")
