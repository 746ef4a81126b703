"""Fade-in of new units: they have arbitrary values, and the columns that read them go from zero to drawn values.

    W̄ = [W; U],   V̄ = [V, λA + Δ],   λ from 0 to 1 over `steps` optimizer steps, Δ: what the columns learn meanwhile

At λ = 0 this is NetMorph with zero readers, and exact where that is. There is no gate in the network: the columns themselves
move by A/steps per step (see `apply/weight_fades.py`), so at any time the weights alone define the network's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.methods.base import Draft, Method, Recipe, free
from outgrow.methods.netmorph import NetMorph
from outgrow.text.plurals import counted


@dataclass(frozen=True, kw_only=True)
class Faded(Method):
    """Random padding, faded in.

    Example:
        >>> Faded(steps=100).name
        'random, faded in over 100 steps'
    """

    steps: int

    @property
    def name(self) -> str:
        return f"random, faded in over {counted(self.steps, 'step')}"

    @property
    def state(self) -> State:
        return State.ANY

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        recipe = NetMorph(init=self.init).recipe(slot, volume, verdict, draft)
        faded = slot.role == "reads" and recipe.fill == "zero"
        return replace(free(draft), fade=self.steps) if faded else recipe
