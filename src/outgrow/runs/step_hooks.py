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

from outgrow.optimizers.wrappers import held_by

MASS = {"ax": "mu"}  # ASGD's average: how much of the parameter goes into it at a step


class Share:
    """The entries of a parameter whose updates are scaled, and by how much.

    Where factors differ along one axis alone, the positions that keep their updates are left out, and cost nothing.
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
        """These entries: a view where they are neighbours, a copy elsewhere."""
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
    def scale(self, parameter: Tensor, before: Tensor, state: Mapping[str, Any], masses: Mapping[str, Any]) -> None:
        """before: the part before the step. state, masses: averages of the parameter are corrected too."""
        now, factor = self.part(parameter), self.factor.to(parameter.device)
        wide = torch.promote_types(parameter.dtype, factor.dtype)
        scaled = now.to(wide).sub(before).mul_(factor).add_(before).to(parameter.dtype)
        if self.zeros:  # also where the update is not finite
            scaled = torch.where(factor == 0, before, scaled)
        if self.ones:
            scaled = torch.where(factor == 1, now, scaled)
        for average in (average for average in MASS if average in state):
            moved = (scaled - now) * masses.get(average, 1.0)
            self.put(state[average], self.part(state[average]) + moved)
        self.put(parameter, scaled)


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
        self.shares: Mapping[int, Share] = {}  # by the parameter's id
        self.level = 1.0  # of the learning rates, in the next step
        self._handles: dict[str, Any] = {}
        self._running = ""  # the hook that torch is calling
        self._open = False  # a step has begun and not ended
        self._rates: list[tuple[int, Any]] = []  # of groups, as they were
        self._before: list[tuple[Tensor, Tensor, Any]] = []

    def settle(self) -> None:
        """Put hooks on, or take them off, as there is something to do or not."""
        if self.shares or self.level != 1:
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
        self._open = bool(self.shares) or self.level != 1
        if self.level != 1:
            self._slow_down()
        if self.shares:
            for parameter in held_by(optimizer):
                if id(parameter) in self.shares:
                    state = optimizer.state.get(parameter, {})
                    masses = {key: _copied(state[mass]) for key, mass in MASS.items() if mass in state}
                    part = self.shares[id(parameter)].part(parameter.detach())
                    self._before.append((parameter, part.clone(), masses))

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._open:
            return
        skipped = getattr(optimizer, "found_inf", None)  # a fused step under a GradScaler that found infinities
        if skipped is None or not bool(skipped):
            for parameter, before, masses in self._before:
                self.shares[id(parameter)].scale(parameter, before, optimizer.state.get(parameter, {}), masses)
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


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)
