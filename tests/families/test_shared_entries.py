"""Positions as ranges, even ranges or lists select the same entries as an index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import outgrow
from outgrow.families.shared_entries import EvenRanges, Listed, Part, Range, selection_of
from tests.helpers.nested_sizes import Recurrent, Tied, grown_apart

CASES = [
    ([0, 1, 2], 5, Range),
    ([2, 3], 5, Range),
    ([0, 1, 3, 4, 6, 7], 9, EvenRanges),
    ([1, 4], 6, EvenRanges),
    ([0, 1, 3, 4], 9, Listed),
    ([0, 2, 3], 6, Listed),
]


@pytest.mark.parametrize(("positions", "size", "kind"), CASES)
def test_a_selection_takes_the_positions(positions: list[int], size: int, kind: type) -> None:
    for axis in (0, 1):
        tensor = torch.randn(size, size, dtype=torch.float64, requires_grad=True)
        chosen = selection_of(np.array(positions), size)
        assert type(chosen) is kind
        found = chosen.of(tensor, axis)
        assert torch.equal(found, tensor.index_select(axis, torch.tensor(positions)))
        found.sum().backward()
        assert tensor.grad is not None
        expected = torch.zeros(size, size, dtype=torch.float64)
        expected.index_fill_(axis, torch.tensor(positions), 1.0)
        assert torch.equal(tensor.grad, expected)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_values_are_written_to_the_entries_of_a_part(number: int) -> None:
    """Each kind of positions along the first and last axis, beside all others along the last."""
    first, size, _ = CASES[number]
    for last, other, _ in CASES:
        owner = nn.Linear(other, size, bias=False)
        whole = torch.randn(size, 3, other)
        owner.weight = nn.Parameter(whole.clone())
        part = Part(owner, "weight", {0: np.array(first), 2: np.array(last)}, (size, 3, other))
        expected = whole.clone()
        values = torch.randn(len(first), 3, len(last))
        for i, row in enumerate(first):
            for k, column in enumerate(last):
                expected[row, :, column] = values[i, :, k]
        part.write(whole, values)
        assert torch.equal(whole, expected)
        assert torch.equal(part.of(whole), values)


@pytest.mark.parametrize("kind", ["recurrent", "tied"])
def test_fused_and_tied_weights(kind: str) -> None:
    torch.manual_seed(0)
    recurrent = kind == "recurrent"
    x = torch.randn(2, 5, 3) if recurrent else torch.randint(0, 7, (2, 5))
    sizes = [outgrow.Widen("*", by=2), outgrow.Widen("*", by=4)] if recurrent else [outgrow.Widen(kind="mlp", by=4)]
    model = Recurrent() if recurrent else Tied()
    apart = grown_apart(model, x, sizes)
    family = outgrow.Family(model, x, *sizes)
    for member, alone in zip(family, apart, strict=True):
        for mode in (True, False):
            torch.testing.assert_close(member.train(mode)(x), alone.train(mode)(x))
            with torch.no_grad():  # torch's fast path
                torch.testing.assert_close(member(x), alone(x))
    alone, gradient = apart[0].train(), dict(family[-1].named_parameters())
    family[0].train()(x).square().sum().backward()
    alone(x).square().sum().backward()
    births = outgrow.cohorts(family[-1])
    for name, parameter in alone.named_parameters():
        shared = gradient[name].grad
        assert parameter.grad is not None
        assert shared is not None
        old = (births[name] == 0).expand_as(shared)
        torch.testing.assert_close(shared[old], parameter.grad.flatten())
        assert not bool(shared[~old].any())
