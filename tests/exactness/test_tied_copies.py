"""Copies of a stream whose embedding is also the head: whole copies are read, and the norm before the head compensates them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import outgrow
from outgrow.errors import MethodError
from tests.helpers.judging import assert_same_function
from tests.helpers.saved_models import TOKENS, Gpt

OTHERS = [TOKENS.flip(0), TOKENS[:1]]


class Rms(nn.Module):
    """An RMS norm with the factor 1 + w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3))


class Plain(Gpt):
    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(8)) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(), norm()


class PostNorm(Plain):
    """The stream comes out of a norm, as in BERT."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm1(self.embedding(tokens))
        return self.head(self.norm2(x + self.fc2(F.gelu(self.fc1(x)))))


class TwoHeads(Plain):
    """A second head, with a weight of its own, reads behind the same norm."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        x = self.norm2(x + self.fc2(F.gelu(self.fc1(self.norm1(x)))))
        return self.head(x), self.other(x)


class Returned(Plain):
    """Nothing between the norm and the head can be rescaled: another weight writes the normalised units elsewhere."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.fc2(F.gelu(self.fc1(self.norm1(x))))
        return self.head(torch.tanh(self.norm2(x)))


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter) + 0.3)
    return model


GROWS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "layer norm": (Plain, {"norm2.weight", "norm2.bias"}),
    "post-norm": (PostNorm, {"norm2.weight", "norm2.bias"}),
    "1 + w": (lambda: Plain(Rms), {"norm2.weight"}),
    "two heads": (TwoHeads, {"norm2.weight", "norm2.bias", "other.weight"}),
}


@pytest.mark.parametrize(("factor", "split"), [(2, "equal"), (3, "random")])
@pytest.mark.parametrize("name", GROWS)
def test_whole_copies_are_exact(name: str, factor: int, split: str) -> None:
    build, rescaled = GROWS[name]
    model = made(build)
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, TOKENS, "embedding", factor=factor, method=outgrow.Net2Net(split=split))
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.shape == (11, 8 * factor)
    changed = {edit.tensor for edit in growth.plan.edits if type(edit).__name__ == "Rescaling"}
    assert changed == rescaled
    assert "since embedding.weight both writes and reads all copies" in str(growth)
    if name == "two heads":
        for mine, other in zip(model(OTHERS[0]), old(OTHERS[0]), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    else:
        assert_same_function(old, model, OTHERS)


def test_copies_are_chosen_where_nothing_else_is_exact() -> None:
    model = made(PostNorm)
    growth = outgrow.widen(model, TOKENS, "embedding", factor=2)
    assert growth.plan.changes[0].method == "net2net"
    with pytest.raises(MethodError, match=r"whole copies of all 16 units"):
        outgrow.widen(model, TOKENS, "embedding", factor=1.5)


def test_momentum_is_that_of_the_grown_model() -> None:
    """One step with a rate of zero: momentum is the gradient, and the grown momentum the gradient of the grown model."""

    def gradients(one: Any) -> None:
        one.zero_grad()
        F.cross_entropy(one(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()

    model = made(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    gradients(model)
    optimizer.step()
    outgrow.widen(model, TOKENS, "embedding", factor=2, method="net2net", optimizer=optimizer)
    gradients(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], parameter.grad, msg=name)


@pytest.mark.parametrize("build", [lambda: Plain(lambda: nn.LayerNorm(8, elementwise_affine=False)), Returned])
def test_without_a_parameter_that_compensates_the_head_it_is_refused(build: Callable[[], nn.Module]) -> None:
    model = made(build)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MethodError, match=r"both writes and reads it \(a tied parameter\)"):
        outgrow.widen(model, TOKENS, "embedding", factor=2, method="net2net")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
