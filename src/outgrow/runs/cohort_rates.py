"""How fast each cohort learns: factors on the updates that optimizers make, entry by entry, and warm-ups after a growth.

    update of an entry = factor of its cohort · what the optimizer makes of it

Entries of one parameter differ in age, and parameter groups can't tell them apart; so updates are scaled around the steps of
any optimizer (see `runs/step_hooks.py`). Where an update is the learning rate times something, this is a factor on the learning
rate. What the optimizer remembers goes on as ever, also for entries that are held by a factor of zero. What fades in is not
scaled: torch calls an optimizer's own hooks before the global one that fades go by.

A warm-up multiplies learning rates by (k + 1)/n in step k after the growth, within the step only: schedulers never see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS

from outgrow.errors import OptimizerError, Problem, ScheduleError
from outgrow.history.cohorts import Cohorts, cohorts
from outgrow.history.growths_on_model import history
from outgrow.optimizers.lookup import weights_of
from outgrow.optimizers.wrappers import held_by, unwrapped
from outgrow.runs.step_hooks import Rein, Share
from outgrow.wrong_arguments import usage

Made = Sequence[tuple[int, int]]  # by optimizer: steps since a hold, and since a warm-up, began


@dataclass(frozen=True)
class Settings:
    """Factors by cohort, a hold of what is old, and a warm-up."""

    factors: Mapping[int, float] = field(default_factory=dict)
    held_before: int | None = None  # cohorts before this one are held
    hold: int | None = None  # for so many steps; until the next growth if None
    warmup: int = 0  # steps

    def factor(self, cohort: int, held: int) -> float:
        """The factor of a cohort for an optimizer that has made so many steps since the hold began."""
        holding = self.held_before is not None and (self.hold is None or held < self.hold)
        return 0.0 if holding and cohort < (self.held_before or 0) else self.factors.get(cohort, 1.0)


@usage("outgrow.Pace(model, optimizer)")
class Pace:
    """Scales the updates of some optimizers by cohort, and warms their learning rates up again after a growth.

    Optimizers have hooks of it only while there is something to scale.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pace = Pace(model, optimizer)
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12, optimizer=optimizer)
        >>> pace.grown(new_lr=1.3, warmup=100)
        >>> pace.factors
        {0: 1.0, 1: 1.3}
    """

    def __init__(self, model: nn.Module, optimizers: Any) -> None:
        given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.model = model
        self._reins = [Rein(self, optimizer) for optimizer in unwrapped(given)]
        self._settings = Settings()
        self._seen: object = None

    @property
    def factors(self) -> dict[int, float]:
        """The factor of each cohort, whatever is held at the moment."""
        return {cohort: self._settings.factors.get(cohort, 1.0) for cohort in range(cohorts(self.model).count + 1)}

    def grown(
        self, new_lr: float | None = None, train: str = "all", hold: int | None = None, warmup: int | None = None
    ) -> None:
        """Go on from a growth that has just been made.

        Args:
            new_lr: a factor for what came with this growth, for good.
            train: "new" holds all that was there before, for `hold` steps, or until the next growth.
            warmup: over how many steps learning rates rise again.

        Each optimizer counts its own steps. An earlier warm-up, or hold of a number of steps, goes on if this growth does not
        begin another.
        """
        if train not in ("all", "new"):
            raise ScheduleError(f"train={train!r}: write 'all', or 'new' to hold what was there before")
        if hold is not None and train != "new":
            raise ScheduleError("hold= says for how many steps train='new' holds what was there before: write that too")
        for name, steps in (("hold", hold), ("warmup", warmup)):
            if steps is not None and (type(steps) is not int or steps < 1):
                raise ScheduleError(f"{name}={steps!r}: write over how many steps, a whole number above 0")
        found, settings = cohorts(self.model), self._settings
        if new_lr is not None:
            settings = replace(settings, factors={**settings.factors, **_checked({found.count: new_lr}, found)})
        if train == "new":
            settings = replace(settings, held_before=found.count, hold=hold)
        if warmup is not None:
            settings = replace(settings, warmup=warmup)
        made = [(0 if train == "new" else held, 0 if warmup else warmed) for held, warmed in self._made()]
        self._take(settings, made, found)

    def set(self, factors: Mapping[int, float]) -> None:
        """Give some cohorts a factor each, for good; others keep theirs.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> pace = Pace(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> pace.set({0: 0.5})
            >>> pace.factors
            {0: 0.5}
        """
        found = cohorts(self.model)
        known = {**self._settings.factors, **_checked(factors, found)}
        self._take(replace(self._settings, factors=known), self._made(), found)

    def remove(self) -> None:
        """Let optimizers make their steps by themselves again."""
        self._take(Settings(), self._made(), cohorts(self.model))

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on, as plain JSON values; which entries are meant is in the model's history."""
        settings = self._settings
        return {
            "factors": {str(cohort): factor for cohort, factor in settings.factors.items()},
            "held_before": settings.held_before,
            "hold": settings.hold,
            "warmup": settings.warmup,
            "made": [list(pair) for pair in self._made()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, on a model that has been through the same growths."""
        found, made = cohorts(self.model), [(int(held), int(warmed)) for held, warmed in state["made"]]
        if len(made) != len(self._reins):
            raise OptimizerError(f"the state is of {len(made)} optimizers, and there are {len(self._reins)} here")
        factors = _checked({int(cohort): factor for cohort, factor in state["factors"].items()}, found)
        if (state["held_before"] or 0) > found.count:
            raise OptimizerError(f"the state is of a model that grew {state['held_before']} times, this one {found.count}")
        self._take(Settings(factors, state["held_before"], state["hold"], int(state["warmup"])), made, found)

    def look(self, rein: Rein) -> None:
        """Before a step: a growth that nobody told of changes shapes, and ends a hold until the next growth."""
        held = [p for p in held_by(rein.optimizer) if id(p) in rein.shares]
        if any(p.shape != rein.shares[id(p)].shape for p in held) or history(self.model) is not self._seen:
            self._take(self._settings, self._made(), cohorts(self.model))

    def stepped(self, rein: Rein) -> None:
        """After a step: count it, and see whether a hold or a warm-up is over."""
        settings = self._settings
        ends = settings.held_before is not None and rein.held + 1 == settings.hold
        rein.held += settings.held_before is not None
        rein.warmed = min(rein.warmed + 1, settings.warmup)
        rein.level = _level(settings, rein.warmed)
        if ends:
            self._take(settings, self._made(), cohorts(self.model))
        else:
            rein.settle()

    def _made(self) -> list[tuple[int, int]]:
        return [(rein.held, rein.warmed) for rein in self._reins]

    def _take(self, settings: Settings, made: Made, found: Cohorts) -> None:
        """Go by other settings, or for another model; on a refusal all is as before."""
        if settings.hold is None and settings.held_before is not None and settings.held_before < found.count:
            settings = replace(settings, held_before=None)
        news = []
        for rein, (held, _) in zip(self._reins, made, strict=True):
            by_cohort = [settings.factor(cohort, held) for cohort in range(found.count + 1)]
            mine = {id(parameter) for parameter in held_by(rein.optimizer)}
            news.append(_shares([(n, p) for n, p in self.model.named_parameters() if id(p) in mine], found, by_cohort))
            if news[-1] and isinstance(rein.optimizer, LBFGS):
                reason = "it searches along lines and remembers its own steps, which can't be changed afterwards"
                raise OptimizerError("updates can't be scaled", [Problem("LBFGS", reason, "leave new_lr= and train= out")])
            if news[-1] and weights_of(rein.optimizer):
                reason = (
                    f"it mixes the parameters with weights of its own ({weights_of(rein.optimizer)!r}), which would not follow"
                )
                problem = Problem(type(rein.optimizer).__name__, reason, "leave new_lr= and train= out")
                raise OptimizerError("updates can't be scaled", [problem])
        self._settings, self._seen = settings, history(self.model)
        for rein, (held, warmed), shares in zip(self._reins, made, news, strict=True):
            rein.held, rein.warmed, rein.shares, rein.level = held, warmed, shares, _level(settings, warmed)
            rein.settle()


def _level(settings: Settings, warmed: int) -> float:
    return min((warmed + 1) / settings.warmup, 1.0) if settings.warmup else 1.0


def _shares(parameters: Sequence[tuple[str, nn.Parameter]], found: Cohorts, by_cohort: Sequence[float]) -> dict[int, Share]:
    """For parameters whose factors are not all one, by id, what is to be scaled of them."""
    result: dict[int, Share] = {}
    for name, parameter in parameters if any(factor != 1 for factor in by_cohort) else ():
        exact = parameter.dtype in (torch.float64, torch.complex128)
        factors = torch.tensor(by_cohort, dtype=torch.float64 if exact else torch.float32)[found[name].long()]
        if bool((factors != 1).any()):
            result[id(parameter)] = Share(parameter, factors.to(parameter.device))
    return result


def _checked(factors: Mapping[int, float], found: Cohorts) -> dict[int, float]:
    for cohort, factor in factors.items():
        if type(cohort) is not int or not 0 <= cohort <= found.count:
            raise OptimizerError(
                f"there is no cohort {cohort!r}: the model grew {found.count} times, so write 0 … {found.count}"
            )
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and isfinite(factor)
        if not number or factor < 0:
            raise OptimizerError(f"a factor of {factor!r} for cohort {cohort}: write a number from 0 on, e.g. 1.3")
    return {cohort: float(factor) for cohort, factor in factors.items()}
