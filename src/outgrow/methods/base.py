"""The base class of methods: a state for new units, and the values that realise it at each slot.

A method gets units, never operators: `exactness/propagate_states.py` has already found which values each reader must hold. It
returns a `Recipe` for each slot: the fill, and for each new unit its model, draw, sign and share. Methods from outside the
package derive from `Method` too, and `outgrow.register_method` gives them a name; their imports are in `outgrow.extending`.
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

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.errors import MethodError
from outgrow.methods.learned import LearnedInit

INITS = ("std", "he", "xavier", "copy")
Init = str | LearnedInit | Callable[[torch.Tensor, tuple[int, ...], torch.Generator], torch.Tensor]


REGISTERED: dict[str, type[Method]] = {}  # methods from outside the package, by name; filled by `outgrow.register_method`


@dataclass(frozen=True)
class Recipe:
    """How the new units of one slot are filled. Tuples have one entry per new unit, unless stated otherwise.

    fill: "free" (drawn values), "zero", "one", "mean" (of the existing units), "copy" (of the units in `models`), "rowmean"
    (of each row of a weight), or "spread" (the row's mean plus or minus drawn values with the row's variance).
    models: the existing unit that each new unit is modelled on; "copy" copies it.
    draws, for "free" and "spread": which draw a unit takes, counted from 0; units with the same draw get the same values.
    signs, for "free", "spread" and "copy": a factor on the values of each unit.
    weights, for "mean": the name of a tensor by which the existing units are weighted.
    keep: a factor on each existing unit that shares its values with copies (one entry per existing unit).
    gradient, gradient_keep: how gradients scale, so that optimizer state follows: for each copy, and for each existing unit.
    fade: the number of optimizer steps over which the values fade in from zero.
    """

    fill: str
    models: tuple[int, ...]
    draws: tuple[int, ...] = ()
    signs: tuple[float, ...] = ()
    weights: str = ""
    keep: tuple[float, ...] = ()
    gradient: tuple[float, ...] = ()
    gradient_keep: tuple[float, ...] = ()
    fade: int = 0


@dataclass(frozen=True)
class Draft:
    """Choices made once per volume, so that all its slots agree.

    new: the number of new units. models: for each, the existing unit that it is modelled on. extra: any value that the method
    passes from `draft` to `recipe`.
    """

    new: int
    models: tuple[int, ...]
    extra: Any = None


@dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """Base of all methods: a frozen dataclass whose fields are the method's options.

    A method of your own defines `state` and `recipe`, and overrides other defaults if needed. It is passed as an instance
    (`method=Echo()`), or by its name after `outgrow.register_method("echo", Echo)`; schedule files hold names.

    init: how free values are drawn: "std" (uniform, with the standard deviation of the tensor they join), "he", "xavier",
    "copy" (of existing units), a function of (existing tensor, shape, generator), or values that are learned from data:
    `outgrow.GradMax` or `outgrow.North`.
    scale: a factor on free values. noise: standard deviation of noise on all new values, relative to their tensor's.

    Example:
        >>> import torch, outgrow
        >>> from dataclasses import dataclass
        >>> from outgrow.extending import Draft, Recipe, Slot, State, Verdict, Volume, forced, free
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Quiet(outgrow.Method):
        ...     state = State.ANY
        ...     def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        ...         return (slot.role == "reads" and forced(slot, verdict, draft)) or free(draft)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> outgrow.widen(model, torch.randn(1, 4), "0", to=9, method=Quiet(init="he")).plan.changes[0].method
        'Quiet'
    """

    init: Init = "std"
    scale: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.init, type) and issubclass(self.init, LearnedInit):
            name = self.init.__name__
            raise MethodError(
                f"init={name} is a class: write init=outgrow.{name}({'batches, loss' if name == 'GradMax' else ''})"
            )
        if not callable(self.init) and not isinstance(self.init, LearnedInit) and self.init not in INITS:
            known = ", ".join(repr(name) for name in INITS)
            raise MethodError(
                f"init={self.init!r}: write one of {known}, a function of (existing tensor, shape, generator), "
                "or outgrow.GradMax(batches, loss) or outgrow.North()"
            )
        for name in ("scale", "noise"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not math.isfinite(value) or (name == "noise" and value < 0):
                raise MethodError(f"{name}={value!r}: write a finite number{' from 0 on' if name == 'noise' else ''}")

    @property
    def name(self) -> str:
        """The name in plans and reports: the registered name, otherwise that of the class."""
        return next((name for name, kind in REGISTERED.items() if kind is type(self)), type(self).__name__)

    @property
    @abc.abstractmethod
    def state(self) -> State:
        """The state of new units where they are written; it decides where the method is exact (see `State`)."""

    @abc.abstractmethod
    def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        """How to fill one slot. `verdict.readers` holds the demands on readers; `forced` gives the recipe for one."""

    @property
    def exact(self) -> bool:
        """Whether the grown model computes the same. If so, outputs are compared, and a growth that changes them is refused."""
        return self.noise == 0.0

    @property
    def step(self) -> int:
        """New units come in multiples of this."""
        return 1

    def draft(self, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
        """Choices for all slots of a volume; by default, the models are the existing units in a random order, cyclically."""
        order = rng.permutation(volume.count)
        return Draft(new, tuple(int(order[index % volume.count]) for index in range(new)))


def typical(slot: Slot, draft: Draft) -> Recipe:
    """The mean of the existing values: for a scale (γ, a variance, a slope)."""
    return Recipe("mean", draft.models)


def zeros(draft: Draft) -> Recipe:
    """Zero for all new units."""
    return Recipe("zero", draft.models)


def free(draft: Draft, draws: tuple[int, ...] | None = None, signs: tuple[float, ...] = ()) -> Recipe:
    """Drawn values: by default, each new unit has a draw of its own, with sign +1."""
    return Recipe("free", draft.models, draws or tuple(range(draft.new)), signs or (1.0,) * draft.new)


def forced(slot: Slot, verdict: Verdict, draft: Draft) -> Recipe | None:
    """The recipe that every method must use for a reader: zero columns, or the mean of each row; None if the choice is free."""
    demand = verdict.readers.get((slot.tensor, slot.axis), "free")
    if demand == "zero":
        return zeros(draft)
    if demand == "mean":
        return Recipe("rowmean", draft.models)
    return None
