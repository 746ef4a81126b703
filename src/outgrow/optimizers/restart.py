"""Restart an optimizer at a growth, as if it had just been constructed: `state="fresh"` in a schedule.

Its state is discarded before the growth, so that any optimizer can follow. Afterwards it has the state that its constructor
would have made for the grown parameters: some make state there (Adagrad), some keep counters in groups (schedule-free, Prodigy)
or in attributes (LBFGS). To find these, a second optimizer of its class is constructed from its groups and settings. Settings
stay: learning rates, weight decays, all arguments of the constructor. The object stays the same, for schedulers and trainers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outgrow.errors import OptimizerError, Problem
from outgrow.model.journal import Journal
from outgrow.optimizers.lookup import name_of
from outgrow.optimizers.wrappers import INSIDE, TRANSPARENT, layers_of, unwrapped

COUNTERS = frozenset({"step", "steps", "k", "t", "counter", "lookahead_step"})  # keys of groups that are not in `defaults`
PARTS = frozenset({"state", "param_groups", "defaults"})


def check_fresh(optimizers: Sequence[Any]) -> None:
    """Raise if an optimizer can't start again: it has state or wraps another one, and its constructor can't be called."""
    problems = []
    for given in optimizers:
        if any(any(one.state.values()) for one in unwrapped([given])) or own_layers(given)[1:]:
            try:
                _remade(given)
            except Exception as error:
                reason = f"it can't be made again from its own settings: {type(error).__name__}: {error}"
                problems.append(Problem(type(given).__name__, reason, "train with another one, or leave state='fresh' out"))
    if problems:
        raise OptimizerError("an optimizer can't start again", problems)


def discard_state(optimizers: Sequence[Any], journal: Journal) -> list[Optimizer]:
    """Clear the state of optimizers before a growth; the journal can restore it. Returns the unwrapped optimizers."""
    real = unwrapped(optimizers)
    for optimizer in real:
        journal.note(partial(_fill, optimizer.state, dict(optimizer.state)))
        optimizer.state.clear()
        for name, value in list(vars(optimizer).items()):  # LBFGS counts its parameters
            if name == "_numel_cache":
                journal.note(partial(setattr, optimizer, name, value))
                setattr(optimizer, name, None)
    return real


def start_fresh(optimizers: Sequence[Any]) -> None:
    """After a growth, give optimizers the state and the counters of newly constructed ones."""
    for given in optimizers:
        try:
            layers = [layer for layer in own_layers(_remade(given)) if isinstance(layer, Optimizer)]
        except Exception:  # its state is empty at the start: see `check_fresh`
            continue
        for optimizer, remade in zip(own_layers(given), layers, strict=True):
            _take_over(optimizer, remade)


def _take_over(optimizer: Any, remade: Any) -> None:
    """Give an optimizer the state, counters and attributes of a newly constructed one."""
    _fill(optimizer.state, dict(remade.state))
    settings = inspect.signature(type(optimizer).__init__).parameters
    for group, new in zip(optimizer.param_groups, remade.param_groups, strict=True):
        counted = [key for key in new if key not in settings and (key in remade.defaults or key in COUNTERS)]
        group.update({key: new[key] for key in counted if _is_number(new[key])})
        for key in [key for key in group if key in COUNTERS and key not in new]:
            del group[key]
    for name, value in vars(remade).items():
        if name not in PARTS and not name.startswith("_optimizer_") and name not in settings and _is_plain(value):
            setattr(optimizer, name, value)


def _remade(given: Any) -> Any:
    """A new optimizer of the same class, groups and settings; a wrapped optimizer is constructed again too."""
    layers = own_layers(given)
    made: Any = None
    for layer in reversed(layers):
        first = [_settings(layer, group) for group in layer.param_groups] if made is None else made
        with torch.random.fork_rng(devices=[]):
            made = type(layer)(first, **optimizer_settings(layer))
    return made


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without the optimizer's counters: the constructor's arguments, and the user's own keys."""
    names = inspect.signature(type(optimizer).__init__).parameters
    own = {key: value for key, value in group.items() if key in names or key not in optimizer.defaults}
    return {key: value for key, value in own.items() if key not in COUNTERS}


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """The constructor's arguments after the first (the parameters), as far as the optimizer keeps them."""
    names = list(inspect.signature(type(optimizer).__init__).parameters)[2:]
    kept = {name: value for name, value in vars(optimizer).items() if name not in INSIDE and _is_plain(value)}
    known = {**kept, **getattr(optimizer, "defaults", {})}
    return {name: known[name] for name in names if name in known}


def own_layers(given: Any) -> list[Any]:
    """An optimizer and the optimizers that it wraps, without the wrappers of trainers."""
    return [one for one in layers_of(given) if isinstance(one, Optimizer) and name_of(type(one)) not in TRANSPARENT]


def _fill(state: dict[Any, Any], entries: Mapping[Any, Any]) -> None:
    state.clear()
    state.update(entries)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether a value is a scalar, a string, a tensor or a container of these, which can't refer to an optimizer."""
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))
