"""What a method is: a state for new units, and the numbers that realise it at each slot.

A method sees units, never operators: `paths` has already found what each reader must hold. It answers with a `Recipe` for each
slot: which fill, and for each new unit its model, draw, sign and share.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch

from outgrow.errors import MethodError
from outgrow.states import State, Verdict
from outgrow.volumes import Slot, Volume

INITS = ("std", "he", "xavier", "copy")
Init = str | Callable[[torch.Tensor, tuple[int, ...], torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How the new units of one slot are filled; lists have one entry a new unit."""

    fill: str
    models: tuple[int, ...]  # old unit that each is modelled on
    draws: tuple[int, ...] = ()
    signs: tuple[float, ...] = ()
    weights: str = ""
    keep: tuple[float, ...] = ()  # one entry an old unit
    gradient: tuple[float, ...] = ()
    gradient_keep: tuple[float, ...] = ()


@dataclass(frozen=True)
class Draft:
    """Choices made once a volume, so that all its slots agree."""

    new: int
    models: tuple[int, ...]
    extra: Any = None


@dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """Base of all methods.

    init: how free values are drawn: "std" (uniform, with the standard deviation of the tensor they join), "he", "xavier",
    "copy" (of existing units), or a function of (existing tensor, shape, generator).
    scale: a factor on free values. noise: standard deviation of noise on all new values, relative to their tensor's.
    """

    init: Init = "std"
    scale: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.init) and self.init not in INITS:
            known = ", ".join(repr(name) for name in INITS)
            raise MethodError(f"init={self.init!r}: write one of {known}, or a function of (existing tensor, shape, generator)")
        for name in ("scale", "noise"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value) or (name == "noise" and value < 0):
                raise MethodError(f"{name}={value!r}: write a finite number{' from 0 on' if name == 'noise' else ''}")

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @property
    @abc.abstractmethod
    def state(self) -> State: ...

    @abc.abstractmethod
    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe: ...

    @property
    def exact(self) -> bool:
        return self.noise == 0.0

    def objection(self, verdict: Verdict) -> str:
        """Why the method will not do on a path; empty if it will."""
        return verdict.refusal if self.exact else ""

    @property
    def step(self) -> int:
        """New units come in multiples of this."""
        return 1

    def draft(self, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
        """Which old units the new ones are modelled on: in turn, from a random start order."""
        order = rng.permutation(volume.count)
        return Draft(new, tuple(int(order[index % volume.count]) for index in range(new)))


def typical(slot: Slot, draft: Draft) -> Recipe:
    """A scale (γ, a variance, a slope) starts at the mean of the existing ones."""
    return Recipe("mean", draft.models)


def zeros(draft: Draft) -> Recipe:
    return Recipe("zero", draft.models)


def free(draft: Draft, draws: tuple[int, ...] | None = None, signs: tuple[float, ...] = ()) -> Recipe:
    return Recipe("free", draft.models, draws or tuple(range(draft.new)), signs or (1.0,) * draft.new)


def forced(slot: Slot, verdict: Verdict, draft: Draft) -> Recipe | None:
    """What a reader must hold whatever the method: zero columns, or the mean of its row."""
    demand = verdict.readers.get((slot.tensor, slot.axis), "free")
    if demand == "zero":
        return zeros(draft)
    if demand == "mean":
        return Recipe("rowmean", draft.models)
    return None
