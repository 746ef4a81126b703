"""Echo: pairs of copies, W̄ = [W; W_g; W_g] and V̄ = [V, a·V_g, −a·V_g]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import outgrow
from outgrow.extending import Draft, Recipe, Slot, State, Verdict, Volume, forced


@dataclass(frozen=True, kw_only=True)
class Echo(outgrow.Method):
    strength: float = 1.0

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
        if slot.role == "reads":
            signs = (self.strength,) * half + (-self.strength,) * half
            return forced(slot, verdict, draft) or Recipe("copy", draft.models, signs=signs)
        return Recipe("copy", draft.models, signs=(1.0,) * draft.new)
