"""R2R (the paper's §4.1): new units come as pairs (l, r) that are written alike and read with opposite signs.

    W̄ = [W; U; U],   scales equal for l and r,   V̄ = [V, A, −A],   U and A free:   V̄ x̄ = V x + A x_l − A x_r = V x.

Exact where the path keeps equal units equal. No noise is needed: l and r receive opposite gradients. With init="copy", U are
copies of existing units (the hybrid with Net2Net that the paper leaves to future work).

Where weights are standardised, (w − μ)/σ over a row, the pair is read as μ + A and μ − A, with A scaled to mean square σ²: mean
and variance of the row do not change, and the standardised columns are opposite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.methods.base import Draft, Method, Recipe, forced, free, typical
from outgrow.wrong_arguments import usage


@usage("outgrow.R2R(init='he')")
@dataclass(frozen=True, kw_only=True)
class R2R(Method):
    """Pairs of new units that cancel.

    Example:
        >>> R2R(init="he", scale=0.5).name
        'r2r'
    """

    @property
    def name(self) -> str:
        return "r2r"

    @property
    def state(self) -> State:
        return State.PAIR

    @property
    def step(self) -> int:
        return 2

    def draft(self, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
        half = super().draft(volume, verdict, new // 2, rng)
        return Draft(new, half.models * 2)

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        half = draft.new // 2
        twins = tuple(range(half)) * 2
        if slot.role == "reads":
            signs = (1.0,) * half + (-1.0,) * half
            if verdict.readers.get((slot.tensor, slot.axis)) == "spread":
                return Recipe("spread", draft.models, twins, signs)
            return forced(slot, verdict, draft) or free(draft, twins, signs)
        if self.init == "copy":
            return Recipe("copy", draft.models, signs=(1.0,) * draft.new)
        if slot.role == "scales" and slot.vector:
            return typical(slot, draft)
        return free(draft, twins)
