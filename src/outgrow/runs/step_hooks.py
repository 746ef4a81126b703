"""Hooks before and after the steps of one optimizer: updates are scaled entry by entry, learning rates during a warm-up.

    before a step   w₀ ← w for parameters with factors that are not all one;   rate ← rate_factor · rate
    after it        w ← w₀ + f ∘ (w − w₀), untouched where f = 1, and w₀ itself where f = 0;   rate restored

If a step fails, rates are restored before the next one, and state dicts that are saved in between hold the unscaled rates.
If an optimizer's step calls the hooked step of its base class, the update is scaled there, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from outgrow.optimizers.wrappers import held_by

AVERAGE_WEIGHTS = {"ax": "mu"}  # ASGD: key of the averaged parameter, and of the weight of the parameter in one update of it


class ScaledEntries:
    """The entries of a parameter whose updates are scaled, and their factors.

    If factors differ along one axis only, positions with a factor of one are left out, and cost nothing.
    """

    def __init__(self, parameter: Tensor, factor: Tensor) -> None:
        """factor: broadcasts to the parameter."""
        self.shape = parameter.shape
        long = [axis for axis, size in enumerate(factor.shape) if size > 1]
        self.axis = long[0] if len(long) == 1 else 0
        self.at: Tensor | None = (factor.flatten() != 1).nonzero().flatten() if len(long) == 1 else None
        self.factor = factor if self.at is None else factor.index_select(self.axis, self.at)
        self.start = int(self.at[0]) if self.at is not None and int(self.at[-1] - self.at[0]) == len(self.at) - 1 else None
        self.ones, self.zeros = (bool((self.factor == number).any()) for number in (1, 0))

    def part(self, tensor: Tensor) -> Tensor:
        """These entries of a tensor: a view if they are adjacent, otherwise a copy."""
        if self.at is None:
            return tensor
        if self.start is not None:
            return tensor.narrow(self.axis, self.start, len(self.at))
        return tensor.index_select(self.axis, self.at.to(tensor.device))

    def put(self, tensor: Tensor, values: Tensor) -> None:
        if self.at is None or self.start is not None:
            self.part(tensor).copy_(values)
        else:
            tensor.index_copy_(self.axis, self.at.to(tensor.device), values)

    @torch.no_grad()
    def scale(self, parameter: Tensor, before: Tensor, state: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
        """Scale the update of these entries, and correct the averages of the parameter in the optimizer's state.

        before: these entries before the step. weights: `AVERAGE_WEIGHTS` before the step, by key of the average.
        """
        now, factor = self.part(parameter), self.factor.to(parameter.device)
        wide = torch.promote_types(parameter.dtype, factor.dtype)
        scaled = now.to(wide).sub(before).mul_(factor).add_(before).to(parameter.dtype)
        if self.zeros:  # also where the update is not finite
            scaled = torch.where(factor == 0, before, scaled)
        if self.ones:
            scaled = torch.where(factor == 1, now, scaled)
        for average in (average for average in AVERAGE_WEIGHTS if average in state):
            moved = (scaled - now) * weights.get(average, 1.0)
            self.put(state[average], self.part(state[average]) + moved)
        self.put(parameter, scaled)


class StepObserver(Protocol):
    """An object that updates the factors of `StepHooks` around each step."""

    def before_step(self, hooks: StepHooks) -> None:
        """Called before a step."""

    def after_step(self, hooks: StepHooks) -> None:
        """Called after a step."""


class StepHooks:
    """Hooks on one optimizer, registered only while there is something to scale.

    A hook can't be removed while torch iterates over the hooks of its kind: it is then removed later.
    """

    def __init__(self, observer: StepObserver, optimizer: Optimizer) -> None:
        self.observer, self.optimizer = observer, optimizer
        self.held = self.warmed = 0  # steps since a hold began, and since a warm-up began
        self.scaled: Mapping[int, ScaledEntries] = {}  # by the parameter's id
        self.rate_factor = 1.0  # on the learning rates, in the next step
        self._handles: dict[str, Any] = {}
        self._running = ""  # the hook that torch is calling
        self._open = False  # a step has begun and not ended
        self._rates: list[tuple[int, Any]] = []  # unscaled rates by index of the group
        self._before: list[tuple[Tensor, Tensor, Any]] = []

    def update(self) -> None:
        """Register the hooks if there is something to scale, otherwise remove them."""
        if self.scaled or self.rate_factor != 1:
            if "before" not in self._handles:
                self._handles["before"] = self.optimizer.register_step_pre_hook(self._begin)
            if "after" not in self._handles:
                self._handles["after"] = self.optimizer.register_step_post_hook(self._end)
            if "saved" not in self._handles:
                self._handles["saved"] = self.optimizer.register_state_dict_post_hook(self._saved)
        else:
            if not self._running:
                self._restore_rates()
            for name in [name for name in self._handles if name != self._running]:
                self._handles.pop(name).remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_rates()
        self._running = "before"
        try:
            self.observer.before_step(self)
        finally:
            self._running = ""
        self._open = bool(self.scaled) or self.rate_factor != 1
        if self.rate_factor != 1:
            self._scale_rates()
        if self.scaled:
            for parameter in held_by(optimizer):
                if id(parameter) in self.scaled:
                    state = optimizer.state.get(parameter, {})
                    weights = {key: _copied(state[weight]) for key, weight in AVERAGE_WEIGHTS.items() if weight in state}
                    part = self.scaled[id(parameter)].part(parameter.detach())
                    self._before.append((parameter, part.clone(), weights))

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            return
        skipped = getattr(optimizer, "found_inf", None)  # a fused step under a GradScaler that found infinities
        if skipped is None or not bool(skipped):
            for parameter, before, weights in self._before:
                self.scaled[id(parameter)].scale(parameter, before, optimizer.state.get(parameter, {}), weights)
        self._restore_rates()
        if skipped is None or not bool(skipped):
            self._running = "after"
            try:
                self.observer.after_step(self)
            finally:
                self._running = ""

    def _scale_rates(self) -> None:
        done: set[int] = set()
        for index, group in enumerate(self.optimizer.param_groups):
            rate = group.get("lr")
            if rate is None:
                continue
            if not isinstance(rate, Tensor):
                self._rates.append((index, rate))
                group["lr"] = rate * self.rate_factor
            elif id(rate) not in done:  # groups may share a tensor; in place, since captured graphs read it there
                done.add(id(rate))
                self._rates.append((index, rate.detach().clone()))
                _write(rate, rate * self.rate_factor)

    def _restore_rates(self) -> None:
        """End a step: restore the rates and drop the copies."""
        for index, rate in self._rates:
            group = self.optimizer.param_groups[index]
            if isinstance(rate, Tensor):
                _write(group["lr"], rate)
            else:
                group["lr"] = rate
        self._rates, self._before, self._open = [], [], False

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Put the unscaled rates into a state dict that is made within a step, or after a failed step."""
        for index, rate in self._rates:
            state["param_groups"][index]["lr"] = _copied(rate)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)
