"""Optimizer classes that a user has described: `outgrow.register_optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from outgrow.errors import OptimizerError, Problem
from outgrow.optimizers.state_rules import WORDS, StateRule

# Registered by the user for the whole process, by class. Weak keys: the registry keeps no class alive.
LOOKUP_CACHE: WeakKeyDictionary[type, Any] = WeakKeyDictionary()  # results of `optimizers/lookup.py`
_REGISTERED: WeakKeyDictionary[type, Mapping[str, StateRule]] = WeakKeyDictionary()


def register_optimizer(cls: type[Any], rules: Mapping[str, str]) -> None:
    """Describe the state that an optimizer class keeps in `optimizer.state`, so that it can follow a growth.

    The description holds for the class and for subclasses with the same `step`. It replaces an earlier one.

    Args:
        cls: the class, a subclass of `torch.optim.Optimizer`.
        rules: for each key of a parameter's state, one of the words "weights", "first moment", "second moment", "magnitude",
            "update", "step length", "rate", "row means", "column means", "per row", "covariance", "basis", "inverse root",
            "scalar", "step count" and "fresh"; docs/optimizers.md explains them. An empty dict describes an optimizer
            that keeps no state.

    Example:
        >>> import outgrow, torch
        >>> class Signum(torch.optim.Optimizer):
        ...     def __init__(self, params, lr=0.01):
        ...         super().__init__(params, {"lr": lr})
        ...     @torch.no_grad()
        ...     def step(self):
        ...         for group in self.param_groups:
        ...             for p in group["params"]:
        ...                 momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        ...                 p -= group["lr"] * momentum.lerp_(p.grad, 0.1).sign()
        >>> register_optimizer(Signum, {"momentum": "first moment"})
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> optimizer = Signum(model.parameters())
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> growth = outgrow.widen(model, torch.ones(1, 4), "0", to=12, optimizer=optimizer)
        >>> optimizer.state[model[0].weight]["momentum"].shape
        torch.Size([12, 4])
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise OptimizerError(f"{cls!r} is no optimizer class: pass the class itself, e.g. register_optimizer(MyAdam, {{…}})")
    if not isinstance(rules, Mapping):
        raise OptimizerError(f"rules={rules!r}: write a dict of state keys and words, e.g. {{'exp_avg': 'first moment'}}")
    wrong = [(key, word) for key, word in rules.items() if not isinstance(key, str) or word not in WORDS]
    if wrong:
        known = ", ".join(map(repr, WORDS))
        problems = [
            Problem(f"{cls.__name__}'s state {key!r}", f"{word!r} is no rule", f"one of {known}") for key, word in wrong
        ]
        raise OptimizerError("an optimizer can't be registered", problems)
    words = list(rules.values())
    if words.count("row means") != words.count("column means"):
        raise OptimizerError("an optimizer can't be registered: each 'row means' needs its 'column means', and the reverse")
    LOOKUP_CACHE.clear()
    _REGISTERED[cls] = {key: WORDS[word] for key, word in rules.items()}


def registered(cls: type) -> Mapping[str, StateRule] | None:
    """The rules of a registered class; None for others."""
    return _REGISTERED.get(cls)
