"""A report names code that reads values of tensors, since another branch may use what grew in another way."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import outgrow
from outgrow.trace.value_reads import NOTE


class Branching(nn.Module):
    """Loud inputs are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.o(h) if x.abs().max() < 8 else self.o(h) / h.norm(dim=-1, keepdim=True)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branching()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Masked(nn.Module):
    """A mask of integers decides, which is no matter of values that a network computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.o(torch.relu(self.a(x if mask.all() else x * mask)))


def test_a_branch_on_values_is_reported_with_its_place() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    model = Branching()
    old = copy.deepcopy(model)
    growth = outgrow.widen(model, x, factor=1.5)
    assert not torch.allclose(old(100 * x), model(100 * x), atol=1e-3)  # what the line warns of
    assert [note for note in growth.notes if note.startswith(NOTE) and "the model" in note]
    assert NOTE in str(growth)
    nested = outgrow.widen(Inner(), x, factor=1.5)
    assert [note for note in nested.notes if note.startswith(NOTE) and "of inner reads" in note]


def test_models_that_do_not_decide_by_values_have_no_such_line() -> None:
    x = torch.randn(6, 5)
    plain = outgrow.widen(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2)), x, factor=1.5)
    masked = outgrow.widen(Masked(), (x, torch.ones(6, 1, dtype=torch.long)), factor=1.5)
    assert not [note for growth in (plain, masked) for note in growth.notes if note.startswith(NOTE)]
