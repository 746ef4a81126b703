"""Let an optimizer start again at a growth, as if it had just been made: `state="fresh"` in a schedule.

What it remembers is discarded before the growth, so that any optimizer can follow. Afterwards it holds what its constructor
would have made for the grown parameters: some make their state there (Adagrad), some keep counters in groups (schedule-free,
Prodigy) or in attributes (LBFGS). To find these, a second optimizer of its class is made from its groups and settings. Settings
stay: learning rates, weight decays, all that the constructor takes. The object stays the same, for schedulers and trainers.
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

COUNTERS = frozenset({"step", "steps", "k", "t", "counter", "lookahead_step"})  # of groups, which no default names
PARTS = frozenset({"state", "param_groups", "defaults"})


def check_fresh(optimizers: Sequence[Any]) -> None:
    """Raise if an optimizer can't start again: its constructor can't be called, and it makes more than an empty state."""
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


def set_aside(optimizers: Sequence[Any], journal: Journal) -> list[Optimizer]:
    """Let optimizers forget, before a growth; the journal can bring it back. Returns those that hold state."""
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
    """After a growth: be as new optimizers would be."""
    for given in optimizers:
        try:
            twins = [layer for layer in own_layers(_remade(given)) if isinstance(layer, Optimizer)]
        except Exception:  # one with an empty state at first: see `check_fresh`
            continue
        for optimizer, twin in zip(own_layers(given), twins, strict=True):
            _take_over(optimizer, twin)


def _take_over(optimizer: Any, twin: Any) -> None:
    _fill(optimizer.state, dict(twin.state))
    settings = inspect.signature(type(optimizer).__init__).parameters
    for group, new in zip(optimizer.param_groups, twin.param_groups, strict=True):
        counted = [key for key in new if key not in settings and (key in twin.defaults or key in COUNTERS)]
        group.update({key: new[key] for key in counted if _is_number(new[key])})
        for key in [key for key in group if key in COUNTERS and key not in new]:
            del group[key]
    for name, value in vars(twin).items():
        if name not in PARTS and not name.startswith("_optimizer_") and name not in settings and _is_plain(value):
            setattr(optimizer, name, value)


def _remade(given: Any) -> Any:
    """An optimizer of the same class, groups and settings, with what it wraps made again likewise."""
    layers = own_layers(given)
    made: Any = None
    for layer in reversed(layers):
        first = [_settings(layer, group) for group in layer.param_groups] if made is None else made
        with torch.random.fork_rng(devices=[]):
            made = type(layer)(first, **optimizer_settings(layer))
    return made


def _settings(optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without what the optimizer counts in it: the constructor's arguments, and what the user has added."""
    names = inspect.signature(type(optimizer).__init__).parameters
    own = {key: value for key, value in group.items() if key in names or key not in optimizer.defaults}
    return {key: value for key, value in own.items() if key not in COUNTERS}


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """The arguments of an optimizer's constructor behind the first, as far as it keeps them."""
    names = list(inspect.signature(type(optimizer).__init__).parameters)[2:]
    kept = {name: value for name, value in vars(optimizer).items() if name not in INSIDE and _is_plain(value)}
    known = {**kept, **getattr(optimizer, "defaults", {})}
    return {name: known[name] for name in names if name in known}


def own_layers(given: Any) -> list[Any]:
    """An optimizer and what it wraps, without the wrappers of trainers."""
    return [one for one in layers_of(given) if isinstance(one, Optimizer) and name_of(type(one)) not in TRANSPARENT]


def _fill(state: dict[Any, Any], entries: Mapping[Any, Any]) -> None:
    state.clear()
    state.update(entries)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Values, tensors, and containers of those: nothing that could refer to the optimizer it belongs to."""
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))
