"""Widening a stream under layer norms: new features are the mean of the old ones.

    rows = mean of the writers' rows   ⇒   the mean stays, the variance becomes σ²·C/C′;   γ′ = γ·√(C/C′),   ε′ = ε·C/C′

The normalised new features are zero, so the columns that read them are free; columns that read the stream without a norm are
zero. Rows that pass a LayerScale are averaged with its weights, and its new entries are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.methods.base import Draft, Method, Recipe, forced, free, typical, zeros
from outgrow.wrong_arguments import usage


@usage("outgrow.MeanFill()")
@dataclass(frozen=True, kw_only=True)
class MeanFill(Method):
    """The mean of the old features, under norms that take statistics over them.

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.randn(1, 4), "0", to=12, method=MeanFill())
        >>> model[1].normalized_shape, round(model[1].eps / 1e-5, 4)
        ((12,), 0.6667)
    """

    @property
    def name(self) -> str:
        return "mean"

    @property
    def state(self) -> State:
        return State.MEAN

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        if slot.role == "writes" and not verdict.weights:
            return free(draft)  # no statistic runs over the units: equal rows, read by zeros, would stay equal
        if slot.role == "writes":
            return Recipe("mean", draft.models, weights=verdict.weights.get(slot.tensor, ""))
        if slot.role == "reads":
            return forced(slot, verdict, draft) or free(draft)
        if slot.shift:
            return zeros(draft)
        if slot.tensor in verdict.weights.values():
            return Recipe("one", draft.models)
        return typical(slot, draft)
