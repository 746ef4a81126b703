"""The effective rank of activations, against their singular values."""

from __future__ import annotations

import pytest
import torch

from outgrow.scoring.effective_rank import effective_rank, numerical_rank, singular_values


def test_ranks_follow_from_the_singular_values_of_the_activations() -> None:
    torch.manual_seed(0)
    activations = torch.randn(50, 3).double() @ torch.randn(3, 8).double()  # three directions
    values = singular_values(activations.T @ activations / 50)
    torch.testing.assert_close(values[:3], torch.linalg.svdvals(activations)[:3] / 50**0.5)
    assert numerical_rank(values) == 3
    shares = values[:3] / values[:3].sum()
    assert effective_rank(values) == pytest.approx(float((-(shares * shares.log()).sum()).exp()), rel=1e-4)
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.zeros(7)) == 0
