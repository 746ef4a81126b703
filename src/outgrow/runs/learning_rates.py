"""Learning rates at a growth: a factor on all rates that a scheduler sets from then on.

    rate′(t) = factor · rate(t)   for all t after the growth

The rates of a scheduler are linear in the values that it stores: the group's current rate, the initial rates, minima and
maxima. So each of these values is multiplied once, and nothing is wrapped: state dicts hold the new values, and load as usual.
Whether that is enough is tested beforehand on copies; a scheduler that stores rates elsewhere is refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, nan
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from outgrow.errors import OptimizerError, Problem
from outgrow.model.journal import Journal
from outgrow.model.sandbox import random_state
from outgrow.optimizers.wrappers import unwrapped

IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
IN_SCHEDULERS = ("base_lrs", "_last_lr", "eta_min", "min_lrs", "max_lrs", "default_min_lr")
TRIED = 50  # steps that are compared
CLOSE, TINY = 1e-3, 1e-6  # tolerance for rounding of rates in float32: relative to a rate, and to the largest rate
BY_HAND = "leave lr= out, and change its rates by hand after the growth"


def scale_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], factor: float, journal: Journal) -> None:
    """Multiply all learning rates of some optimizers, permanently.

    Wrappers of trainers around optimizers and schedulers are unwrapped. Raises OptimizerError, and changes nothing, if a
    scheduler would not follow.
    """
    _check_factor(factor, positive=True)
    real, bare = unwrapped(optimizers), bare_schedulers(schedulers)
    if factor != 1:
        _check(real, bare, factor)
        _scale(real, bare, factor, journal)


def scale_decay(optimizers: Sequence[Any], factor: float, journal: Journal) -> None:
    """Multiply the weight decay of every group."""
    _check_factor(factor, positive=False)
    for optimizer in unwrapped(optimizers):
        for group in optimizer.param_groups:
            if group.get("weight_decay") is not None:
                _set(group, "weight_decay", group["weight_decay"] * factor, journal)


def bare_schedulers(schedulers: Sequence[Any]) -> list[LRScheduler]:
    """The torch schedulers in these, each once: trainers wrap schedulers in an object with an attribute `scheduler`."""
    found: dict[int, LRScheduler] = {}
    for given in schedulers:
        layer = given
        while not isinstance(layer, LRScheduler):
            layer = getattr(layer, "scheduler", None)
            if layer is None:
                kind = type(given).__name__
                raise OptimizerError(f"{kind} is not a learning-rate scheduler of torch: {BY_HAND}")
        found[id(layer)] = layer
    return list(found.values())


def _check_factor(factor: float, positive: bool) -> None:
    if not isinstance(factor, (int, float)) or not isfinite(factor) or factor < 0 or (positive and not factor):
        raise OptimizerError(f"a factor of {factor!r}: write a number above 0, e.g. 0.2")


def _scale(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler], factor: float, journal: Journal) -> None:
    """Multiply every value that is a rate, once, even if several groups or schedulers share it."""
    done: set[int] = set()  # tensors that are the rate of several groups
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for name in (name for name in IN_GROUPS if name in group):
            if name != "lr" or not isinstance(group["lr"], Tensor):
                _set(group, name, _times(group[name], factor), journal)
            elif id(group["lr"]) not in done:  # in place: captured graphs read it there
                done.add(id(group["lr"]))
                journal.note(partial(_write, group["lr"], group["lr"].detach().clone()))
                _write(group["lr"], group["lr"] * factor)
    for scheduler in _with_parts(schedulers):
        names = (*IN_SCHEDULERS, "eps") if isinstance(scheduler, ReduceLROnPlateau) else IN_SCHEDULERS
        for name in (name for name in names if vars(scheduler).get(name) is not None):
            _set(vars(scheduler), name, _times(vars(scheduler)[name], factor), journal)


def _times(value: Any, factor: float) -> Any:
    """A rate, or a list of rates, times a factor, as new objects: schedulers share lists and tensors."""
    return type(value)(_times(item, factor) for item in value) if isinstance(value, (list, tuple)) else value * factor


def _set(place: dict[str, Any], name: str, value: Any, journal: Journal) -> None:
    journal.note(partial(place.__setitem__, name, place[name]))
    place[name] = value


@torch.no_grad()
def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _with_parts(schedulers: Sequence[LRScheduler]) -> list[LRScheduler]:
    """Schedulers and the schedulers inside them, each once."""
    found: dict[int, LRScheduler] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        if id(scheduler) not in found:
            found[id(scheduler)] = scheduler
            for value in vars(scheduler).values():
                waiting += [part for part in _items(value) if isinstance(part, LRScheduler)]
    return list(found.values())


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _items(item)
    else:
        yield value


def _check(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler], factor: float) -> None:
    """Raise if rates would not follow: run two copies of all schedulers, one with multiplied rates, and compare."""
    for optimizer in optimizers:
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise OptimizerError(f"{type(optimizer).__name__} has no learning rate to multiply: leave lr= out")
    plain, scaled = _Copies(optimizers, schedulers), _Copies(optimizers, schedulers)
    _scale(scaled.optimizers, scaled.schedulers, factor, Journal())
    over: set[int] = set()
    largest = 0.0
    with random_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn, (place, scheduler) in ((turn, pair) for turn in range(TRIED) for pair in enumerate(schedulers)):
            if place in over:
                continue
            try:
                _step(plain.schedulers[place])
                _step(scaled.schedulers[place])
            except Exception as error:
                if not turn and not type(scheduler).__module__.startswith("torch."):
                    raise _refusal(scheduler, f"a copy of it does not run: {type(error).__name__}: {error}") from error
                over.add(place)  # OneCycleLR raises after its last step
            before, after = plain.rates(), scaled.rates()
            largest = max(largest, *map(abs, before))
            for rate, new in zip(before, after, strict=True):
                if abs(new - factor * rate) > factor * max(CLOSE * abs(rate), TINY * largest):
                    reason = f"it stores rates in an unknown place: {factor:g} × {rate:g} would become {new:g}"
                    raise _refusal(scheduler, reason)


def _step(scheduler: LRScheduler) -> None:
    scheduler.step(nan) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()  # NaN never counts as better


def _refusal(scheduler: LRScheduler, reason: str) -> OptimizerError:
    return OptimizerError("a scheduler does not follow", [Problem(type(scheduler).__name__, reason, BY_HAND)])


class _Copies:
    """Copies of schedulers, on stand-ins for their optimizers with the same groups, but without parameters and state."""

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self.known: dict[int, Any] = {}
        self.twins = {id(optimizer.param_groups): self._stand_in(optimizer) for optimizer in optimizers}
        self.optimizers = list(self.twins.values())
        self.schedulers: list[LRScheduler] = [self.copied(scheduler) for scheduler in schedulers]

    def rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]

    def _stand_in(self, optimizer: Optimizer) -> Optimizer:
        twin = torch.optim.SGD([torch.zeros(1)])
        twin.defaults = dict(optimizer.defaults)
        twin.param_groups = [
            {**{key: self.copied(value) for key, value in group.items() if key not in ("params", "param_names")}, "params": []}
            for group in optimizer.param_groups
        ]
        return twin

    def copied(self, value: Any) -> Any:
        """A copy of a value that a scheduler holds; functions, classes and modules are not copied."""
        if id(value) in self.known:
            return self.known[id(value)]
        if isinstance(value, Optimizer):
            if id(value.param_groups) not in self.twins:
                instead = "pass that optimizer to the run too"
                found = f"a scheduler sets the rates of an optimizer outside the run, {type(value).__name__}"
                raise OptimizerError(f"{found}: {instead}")
            return self.twins[id(value.param_groups)]
        twin: Any
        if isinstance(value, LRScheduler):
            twin = self.known[id(value)] = object.__new__(type(value))
            vars(twin).update({name: self.copied(item) for name, item in vars(value).items()})
        elif type(value) in (list, tuple):
            twin = type(value)(map(self.copied, value))
        elif type(value) is dict:
            twin = {key: self.copied(item) for key, item in value.items()}
        elif isinstance(value, Tensor):
            twin = value.detach().clone()
        elif isinstance(value, MethodType) and isinstance(value.__self__, LRScheduler):
            twin = MethodType(value.__func__, self.copied(value.__self__))
        elif isinstance(value, (nn.Module, type, FunctionType, BuiltinFunctionType, MethodType)):
            twin = value
        else:
            twin = copy.copy(value)
        self.known[id(value)] = twin
        return twin
