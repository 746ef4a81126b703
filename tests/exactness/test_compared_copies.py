"""Copies of embeddings that are compared by cosine similarity: similarities stay; what a norm with an ε reads is rescaled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import MethodError
from tests.helpers.judging import assert_same_function

X = torch.randn(5, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHERS = [X.flip(0) * 2, X[:2].cos()]


class Encoder(nn.Module):
    """A stream that comes out of a norm, as in BERT; its mean over positions is an embedding."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.up, self.down, self.last = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6)
        self.how = how
        if how == "two towers":
            self.other = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        e = self.last(h + self.down(F.gelu(self.up(h)))).mean(1)
        match self.how:
            case "normalize":
                e = F.normalize(e, dim=-1)
                return e @ e.T
            case "two towers":
                return F.normalize(e, dim=-1) @ F.normalize(self.other(x[:, 0]), dim=-1).T
            case "no ε":
                e = e / e.norm(dim=-1, keepdim=True)
                return torch.einsum("id,jd->ij", e, e)
            case "squares":
                return e / e.square().sum(-1, keepdim=True).sqrt() @ (e / (e * e).sum(-1, keepdim=True).sqrt()).T
            case "cosine":
                return F.cosine_similarity(e[:, None], e[None], dim=-1)
            case "half a norm":
                return e / e.norm(dim=-1, keepdim=True) @ e.T
        return e @ e.T


def made(how: str) -> nn.Module:
    torch.manual_seed(0)
    model = Encoder(how).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


LAST = {"last.weight", "last.bias"}
RESCALED = {
    "normalize": LAST,
    "two towers": LAST | {"other.weight", "other.bias"},
    "cosine": LAST,
    "no ε": set[str](),
    "squares": set[str](),
}


@pytest.mark.parametrize(("factor", "split"), [(2, "equal"), (3, "random")])
@pytest.mark.parametrize("how", RESCALED)
def test_similarities_stay_under_whole_copies(how: str, factor: int, split: str) -> None:
    model = made(how)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, X, "enter", factor=factor, method=outgrow.Net2Net(split=split))
    assert model.last.weight.shape == (6 * factor,)
    changed = {edit.tensor for edit in growth.plan.edits if type(edit).__name__ == "Rescaling"}
    assert changed == RESCALED[how]
    assert ("compares or adds up all copies" in str(growth)) == bool(changed)
    assert_same_function(old, model, OTHERS)


@pytest.mark.parametrize("how", ["half a norm", "no norm"])
def test_products_whose_scale_no_norm_determines_are_refused(how: str) -> None:
    with pytest.raises(MethodError, match=r"two activations are multiplied and summed over it|copies would change its result"):
        outgrow.widen(made(how), X, "enter", factor=2, method="net2net")


class CosineAttention(nn.Module):
    """Queries and keys of length 1, and torch's kernel, which divides by √size."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_features_of_heads_are_not_copied() -> None:
    torch.manual_seed(0)
    found = {volume.name: volume for volume in outgrow.volumes(CosineAttention().double(), X) if volume.kind == "head_dim"}
    assert "v" in found
    assert "net2net" in found["v"].methods
    assert not found["q#2"].methods


def test_momentum_is_that_of_the_grown_model() -> None:
    """One step with a rate of zero: momentum is the gradient, and the grown momentum the gradient of the grown model."""
    model = made("normalize")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model(X).square().sum().backward()
    optimizer.step()
    outgrow.widen(model, X, "enter", factor=2, method="net2net", optimizer=optimizer)
    model.zero_grad()
    model(X).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], parameter.grad, msg=name)
