"""Fade-in of new units: they are anything at all, and what reads them comes from zero to drawn values over some steps.

    W̄ = [W; U],   V̄ = [V, λA + Δ],   λ from 0 to 1 over `steps` optimizer steps, Δ what is learned meanwhile

At λ = 0 this is NetMorph with zero readers, and legal where that is. There is no gate in the network: the columns themselves
move, by A/steps a step (see `training.drift`), so that at any moment the weights alone tell what the network computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.methods.base import Draft, Method, Recipe, free
from outgrow.methods.netmorph import NetMorph


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
        return f"random, faded in over {self.steps} steps"

    @property
    def state(self) -> State:
        return State.ANY

    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        recipe = NetMorph(init=self.init).recipe(slot, volume, verdict, draft)
        faded = slot.role == "reads" and recipe.fill == "zero"
        return replace(free(draft), fade=self.steps) if faded else recipe
