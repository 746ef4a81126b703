"""A rate per cohort and layer, as in variance transfer (Yuan et al., 2023): weights learn in proportion to their size.

    rate of cohort k in a layer = rate · ‖W_k‖ / ‖W_0‖     W_k: the weights of that layer that came with growth k

This is our reading of the paper, without its code. Here, norms are computed at the beginning of each epoch, and factors lie
between a tenth and ten: without a bound, weights that begin at zero would never move. Biases and the parameters of batch norms
have the common rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import outgrow

LEAST, MOST = 0.1, 10.0


class CohortRates:
    """Factors on the updates of a model's parameters, in tensors of the parameters' shapes that stay where they are."""

    def __init__(self, model: nn.Module) -> None:
        found = outgrow.cohorts(model)
        self.count = found.count + 1
        self.parameters = dict(model.named_parameters())
        self.factors = {name: torch.ones_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.cohorts = {
            name: found[name].long().to(p.device).expand(*p.shape[:2], *[1] * (p.ndim - 2))
            for name, p in self.parameters.items()
            if p.ndim > 1
        }

    @torch.no_grad()
    def update(self) -> None:
        """Compute the factors from the present weights."""
        for name, cohort in self.cohorts.items():
            self.factors[name].copy_(self.of_cohorts(name)[cohort])

    @torch.no_grad()
    def of_cohorts(self, name: str) -> Tensor:
        """The factor of each cohort of one parameter. Where a cohort has no entries, the value has no meaning."""
        weights, cohort = self.parameters[name].detach(), self.cohorts[name]
        squares = weights.square().flatten(2).sum(2) if weights.ndim > 2 else weights.square()
        sums = squares.new_zeros(self.count).index_add_(0, cohort.flatten(), squares.flatten())
        return (sums.sqrt() / sums[0].sqrt()).clamp(LEAST, MOST)

    def means(self) -> list[float]:
        """The mean factor of each cohort over the entries of all layers."""
        totals, entries = torch.zeros(self.count), torch.zeros(self.count)
        for name, cohort in self.cohorts.items():
            numbers = torch.bincount(cohort.flatten(), minlength=self.count).cpu()
            totals += torch.where(numbers > 0, self.of_cohorts(name).cpu(), 0.0) * numbers
            entries += numbers
        return [round(value, 4) for value in (totals / entries).tolist()]
