"""What is done around the steps of one optimizer: its updates are scaled entry by entry, its learning rates for a while.

    before a step   w₀ ← w for parameters with factors that are not all one;   rate ← level · rate
    after it        w ← w₀ + f ∘ (w − w₀), untouched where f = 1, and w₀ itself where f = 0;   rate as it was

If a step fails, rates are put back at the next one, and states that are saved meanwhile hold them as they were. An optimizer
whose step calls the hooked step of its base class is scaled there, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from outgrow.training.optimizer import held_by

MASS = {"ax": "mu"}  # ASGD's average: how much of the parameter goes into it at a step


class Driver(Protocol):
    """Who says how fast to go."""

    def look(self, rein: Rein) -> None:
        """A step is about to be made: is all still as it was?"""

    def stepped(self, rein: Rein) -> None:
        """A step has been made."""


class Rein:
    """Hooks on one optimizer, there while they have something to do.

    A hook can't be taken off while torch goes through the list it is in: one that has nothing to do any more stays behind
    until it can.
    """

    def __init__(self, driver: Driver, optimizer: Optimizer) -> None:
        self.driver, self.optimizer = driver, optimizer
        self.held = self.warmed = 0  # steps made since a hold, and a warm-up, began
        self.factors: Mapping[int, Tensor] = {}  # by the parameter's id; each broadcasts to it
        self.shapes: Mapping[int, torch.Size] = {}  # and the shapes that these parameters had then
        self.level = 1.0  # of the learning rates, in the next step
        self._handles: dict[str, Any] = {}
        self._running = ""  # the hook that torch is calling
        self._open = False  # a step has begun and not ended
        self._rates: list[tuple[int, Any]] = []  # of groups, as they were
        self._before: list[tuple[Tensor, Tensor, Any]] = []

    def settle(self) -> None:
        """Put hooks on, or take them off, as there is something to do or not."""
        if self.factors or self.level != 1:
            if "before" not in self._handles:
                self._handles["before"] = self.optimizer.register_step_pre_hook(self._begin)
            if "after" not in self._handles:
                self._handles["after"] = self.optimizer.register_step_post_hook(self._end)
            if "saved" not in self._handles:
                self._handles["saved"] = self.optimizer.register_state_dict_post_hook(self._saved)
        else:
            if not self._running:
                self._put_back()
            for name in [name for name in self._handles if name != self._running]:
                self._handles.pop(name).remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back()
        self._running = "before"
        try:
            self.driver.look(self)
        finally:
            self._running = ""
        self._open = bool(self.factors) or self.level != 1
        if self.level != 1:
            self._slow_down()
        if self.factors:
            for parameter in held_by(optimizer):
                if id(parameter) in self.factors:
                    state = optimizer.state.get(parameter, {})
                    masses = {key: _copied(state[mass]) for key, mass in MASS.items() if mass in state}
                    self._before.append((parameter, parameter.detach().clone(), masses))

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            return
        skipped = getattr(optimizer, "found_inf", None)  # a fused step under a GradScaler that found infinities
        if skipped is None or not bool(skipped):
            for parameter, before, masses in self._before:
                _scale(parameter, before, self.factors[id(parameter)], optimizer.state.get(parameter, {}), masses)
        self._put_back()
        if skipped is None or not bool(skipped):
            self._running = "after"
            try:
                self.driver.stepped(self)
            finally:
                self._running = ""

    def _slow_down(self) -> None:
        done: set[int] = set()
        for index, group in enumerate(self.optimizer.param_groups):
            rate = group.get("lr")
            if rate is None:
                continue
            if not isinstance(rate, Tensor):
                self._rates.append((index, rate))
                group["lr"] = rate * self.level
            elif id(rate) not in done:  # groups may share a tensor; captured graphs read it where it is
                done.add(id(rate))
                self._rates.append((index, rate.detach().clone()))
                _write(rate, rate * self.level)

    def _put_back(self) -> None:
        """End a step: rates are as they were, copies are dropped."""
        for index, rate in self._rates:
            group = self.optimizer.param_groups[index]
            if isinstance(rate, Tensor):
                _write(group["lr"], rate)
            else:
                group["lr"] = rate
        self._rates, self._before, self._open = [], [], False

    def _saved(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """A state that is saved within a step, or after one that failed, holds the rates as they were."""
        for index, rate in self._rates:
            state["param_groups"][index]["lr"] = _copied(rate)


@torch.no_grad()
def _scale(parameter: Tensor, before: Tensor, factor: Tensor, state: Mapping[str, Any], masses: Mapping[str, Any]) -> None:
    wide = torch.promote_types(parameter.dtype, factor.dtype)
    factor = factor.to(parameter.device)
    scaled = (before.to(wide) + factor * (parameter.to(wide) - before.to(wide))).to(parameter.dtype)
    scaled = torch.where(factor == 1, parameter, torch.where(factor == 0, before, scaled))
    for key in (key for key in MASS if key in state):
        state[key].add_((scaled - parameter) * masses.get(key, 1.0))
    parameter.copy_(scaled)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)
