"""Learning speed per cohort: factors on the optimizers' updates, entry by entry, and warm-ups after a growth.

    update of an entry = factor of its cohort · the optimizer's own update

The entries of one parameter can belong to several cohorts, which parameter groups can't separate. So updates are scaled before
and after the steps of any optimizer (see `runs/step_hooks.py`). If an update is the learning rate times something, this is a
factor on the learning rate. The optimizer's state is updated as usual, also for entries that are held by a factor of zero.
Values that fade in are not scaled: torch calls an optimizer's own hooks before the global hook that advances fades.

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
from outgrow.runs.step_hooks import ScaledEntries, StepHooks
from outgrow.text.plurals import counted
from outgrow.wrong_arguments import usage

StepsMade = Sequence[tuple[int, int]]  # per optimizer: steps since the hold began, and since the warm-up began


@dataclass(frozen=True)
class Settings:
    """Factors by cohort, a hold of the older cohorts, and a warm-up."""

    factors: Mapping[int, float] = field(default_factory=dict)
    held_before: int | None = None  # cohorts before this one are held
    hold: int | None = None  # number of steps; None: until the next growth
    warmup: int = 0  # number of steps

    def factor(self, cohort: int, held: int) -> float:
        """The factor of a cohort for an optimizer that has made `held` steps since the hold began."""
        holding = self.held_before is not None and (self.hold is None or held < self.hold)
        return 0.0 if holding and cohort < (self.held_before or 0) else self.factors.get(cohort, 1.0)


@usage("outgrow.Pace(model, optimizer)")
class Pace:
    """Scale the updates of optimizers by cohort, and warm up their learning rates after a growth.

    Hooks are registered on the optimizers only while there is something to scale.

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
        self._hooks = [StepHooks(self, optimizer) for optimizer in unwrapped(given)]
        self._settings = Settings()
        self._history: object = None  # of the model, when the factors were computed
        self._frozen: Sequence[nn.Parameter] = ()  # had no updates to scale then

    @property
    def factors(self) -> dict[int, float]:
        """The factor of each cohort, without a hold."""
        return {cohort: self._settings.factors.get(cohort, 1.0) for cohort in range(cohorts(self.model).count + 1)}

    def grown(
        self, new_lr: float | None = None, train: str = "all", hold: int | None = None, warmup: int | None = None
    ) -> None:
        """Take a growth into account; call it right after the growth.

        Args:
            new_lr: a permanent factor for the entries added by this growth.
            train: "new" holds all earlier entries, for `hold` steps, or until the next growth.
            warmup: the number of steps over which learning rates rise again.

        Each optimizer counts its own steps. An earlier warm-up, or an earlier hold of a fixed number of steps, continues unless
        this growth starts another.
        """
        if train not in ("all", "new"):
            raise ScheduleError(f"train={train!r}: write 'all', or 'new' to hold the earlier entries")
        if hold is not None and train != "new":
            raise ScheduleError("hold= is the number of steps for which train='new' holds the earlier entries: add train='new'")
        for name, steps in (("hold", hold), ("warmup", warmup)):
            if steps is not None and (type(steps) is not int or steps < 1):
                raise ScheduleError(f"{name}={steps!r}: write a number of steps, an integer above 0")
        found, settings = cohorts(self.model), self._settings
        if new_lr is not None:
            settings = replace(settings, factors={**settings.factors, **_checked({found.count: new_lr}, found)})
        if train == "new":
            settings = replace(settings, held_before=found.count, hold=hold)
        if warmup is not None:
            settings = replace(settings, warmup=warmup)
        made = [(0 if train == "new" else held, 0 if warmup else warmed) for held, warmed in self._steps_made()]
        self._apply(settings, made, found)

    def set(self, factors: Mapping[int, float]) -> None:
        """Set permanent factors of some cohorts; others keep theirs.

        Example:
            >>> model = nn.Linear(2, 1)
            >>> pace = Pace(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> pace.set({0: 0.5})
            >>> pace.factors
            {0: 0.5}
        """
        found = cohorts(self.model)
        known = {**self._settings.factors, **_checked(factors, found)}
        self._apply(replace(self._settings, factors=known), self._steps_made(), found)

    def end_hold(self) -> None:
        """End a hold of earlier entries; factors and warm-ups stay."""
        if self._settings.held_before is not None:
            self._apply(replace(self._settings, held_before=None), self._steps_made(), cohorts(self.model))

    def remove(self) -> None:
        """Remove all factors, holds and warm-ups."""
        self._apply(Settings(), self._steps_made(), cohorts(self.model))

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values; the entries of each cohort follow from the model's growth history."""
        settings = self._settings
        return {
            "factors": {str(cohort): factor for cohort, factor in settings.factors.items()},
            "held_before": settings.held_before,
            "hold": settings.hold,
            "warmup": settings.warmup,
            "made": [list(pair) for pair in self._steps_made()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, for a model with the same growths."""
        found, made = cohorts(self.model), [(int(held), int(warmed)) for held, warmed in state["made"]]
        if len(made) != len(self._hooks):
            raise OptimizerError(f"the state is of {counted(len(made), 'optimizer')}, and there are {len(self._hooks)} here")
        factors = _checked({int(cohort): factor for cohort, factor in state["factors"].items()}, found)
        if (state["held_before"] or 0) > found.count:
            raise OptimizerError(f"the state is of a model that grew {state['held_before']} times, this one {found.count}")
        self._apply(Settings(factors, state["held_before"], state["hold"], int(state["warmup"])), made, found)

    def before_step(self, hooks: StepHooks) -> None:
        """Recompute factors after a growth without a call of `grown`: shapes differ, and a hold until the next growth ends."""
        held = [p for p in held_by(hooks.optimizer) if id(p) in hooks.scaled]
        other_shapes = any(p.shape != hooks.scaled[id(p)].shape for p in held)
        if other_shapes or any(p.requires_grad for p in self._frozen) or history(self.model) is not self._history:
            self._apply(self._settings, self._steps_made(), cohorts(self.model))

    def after_step(self, hooks: StepHooks) -> None:
        """Count a step, and end a hold or a warm-up that is over."""
        settings = self._settings
        ends = settings.held_before is not None and hooks.held + 1 == settings.hold
        hooks.held += settings.held_before is not None
        hooks.warmed = min(hooks.warmed + 1, settings.warmup)
        hooks.rate_factor = _warmup_factor(settings, hooks.warmed)
        if ends:
            self._apply(settings, self._steps_made(), cohorts(self.model))
        else:
            hooks.update()

    def _steps_made(self) -> list[tuple[int, int]]:
        return [(hooks.held, hooks.warmed) for hooks in self._hooks]

    def _apply(self, settings: Settings, made: StepsMade, found: Cohorts) -> None:
        """Use these settings, for the model as it is now; if they are refused, nothing changes."""
        if settings.hold is None and settings.held_before is not None and settings.held_before < found.count:
            settings = replace(settings, held_before=None)
        scaled, frozen = [], [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        for hooks, (held, _) in zip(self._hooks, made, strict=True):
            by_cohort = [settings.factor(cohort, held) for cohort in range(found.count + 1)]
            mine = {id(parameter) for parameter in held_by(hooks.optimizer)}
            parameters = [(name, p) for name, p in self.model.named_parameters() if id(p) in mine]
            scaled.append(_scaled_entries(parameters, found, by_cohort))
            if scaled[-1] and isinstance(hooks.optimizer, LBFGS):
                reason = "its line search stores its own steps, which can't be changed afterwards"
                raise OptimizerError("updates can't be scaled", [Problem("LBFGS", reason, "leave new_lr= and train= out")])
            if scaled[-1] and weights_of(hooks.optimizer):
                reason = (
                    f"it mixes the parameters with weights of its own ({weights_of(hooks.optimizer)!r}), which would not follow"
                )
                problem = Problem(type(hooks.optimizer).__name__, reason, "leave new_lr= and train= out")
                raise OptimizerError("updates can't be scaled", [problem])
        self._settings, self._history = settings, history(self.model)
        self._frozen = frozen if any(scaled) else []
        for hooks, (held, warmed), entries in zip(self._hooks, made, scaled, strict=True):
            hooks.held, hooks.warmed, hooks.scaled = held, warmed, entries
            hooks.rate_factor = _warmup_factor(settings, warmed)
            hooks.update()


def _warmup_factor(settings: Settings, warmed: int) -> float:
    return min((warmed + 1) / settings.warmup, 1.0) if settings.warmup else 1.0


def _scaled_entries(
    parameters: Sequence[tuple[str, nn.Parameter]], found: Cohorts, by_cohort: Sequence[float]
) -> dict[int, ScaledEntries]:
    """For each parameter whose factors are not all one, by id: the entries to scale."""
    result: dict[int, ScaledEntries] = {}
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    for name, parameter in trained if any(factor != 1 for factor in by_cohort) else ():
        exact = parameter.dtype in (torch.float64, torch.complex128)
        factors = torch.tensor(by_cohort, dtype=torch.float64 if exact else torch.float32)[found[name].long()]
        if bool((factors != 1).any()):
            result[id(parameter)] = ScaledEntries(parameter, factors.to(parameter.device))
    return result


def _checked(factors: Mapping[int, float], found: Cohorts) -> dict[int, float]:
    for cohort, factor in factors.items():
        if type(cohort) is not int or not 0 <= cohort <= found.count:
            raise OptimizerError(
                f"there is no cohort {cohort!r}: the model has grown {counted(found.count, 'time')}, so write 0 … {found.count}"
            )
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and isfinite(factor)
        if not number or factor < 0:
            raise OptimizerError(f"a factor of {factor!r} for cohort {cohort}: write a number that is not negative, e.g. 1.3")
    return {cohort: float(factor) for cohort, factor in factors.items()}
