"""Find what is known of an optimizer: by its exact class, or by the class that it takes all of its arithmetic from.

A subclass is known like its base as long as it overrides none of the functions in which the base computes. One that overrides
`step` may keep anything under the same keys, and has to be registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from outgrow.optimizers.known import KNOWN, REFUSED
from outgrow.optimizers.register import registered
from outgrow.optimizers.rules import WORDS, Rule, Shape, shape_of

REGISTER = "describe its state with outgrow.register_optimizer({name}, {{…}})"
HARMLESS = frozenset({"__init__", "__repr__", "__setstate__", "__getstate__", "zero_grad", "state_dict", "load_state_dict"})


@dataclass(frozen=True)
class Known:
    """What is known of a class: a rule for each key (or pattern of keys), or why it can't follow a growth."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    refusal: str = ""

    def rule(self, key: Any) -> Rule | None:
        """The rule of a key of the state; None if there is none."""
        if key in self.rules:
            return self.rules[key]
        return next((rule for pattern, rule in self.rules.items() if isinstance(key, str) and fnmatchcase(key, pattern)), None)

    @property
    def counts_apart(self) -> bool:
        """Whether steps are counted for each parameter, so that one without state starts at the beginning."""
        return any(rule.word == "step count" for rule in self.rules.values())


def known(optimizer: Optimizer) -> Known:
    """What is known of an optimizer's class; for an unknown class a refusal that says so."""
    cls = type(optimizer)
    for base in cls.__mro__:
        if not issubclass(base, Optimizer) or base is Optimizer:
            continue
        rules = registered(base)
        name = name_of(base)
        if rules is None and name in KNOWN:
            rules = {key: WORDS[word] for key, word in KNOWN[name].items()}
        if rules is None and name not in REFUSED:
            continue
        changed = _overridden(cls, base)
        if changed:
            reason = f"it overrides {base.__name__}.{changed}, so what it keeps in its state is not known"
            return Known(refusal=reason)
        return Known(rules) if rules is not None else Known(refusal=REFUSED[name])
    return Known(refusal=f"{cls.__module__}.{cls.__qualname__} is none of the classes whose state outgrow knows")


def name_of(cls: type) -> str:
    """The package and the class: libraries move classes between their files."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def unfollowable(optimizer: Any) -> str:
    """Why an optimizer's state can't follow a growth, judged by its class alone, before there is any state; "" if it can."""
    return known(optimizer).refusal


def state_shape(optimizer: Any, key: Any, value: Any, shape: Shape) -> Shape | None:
    """The shape that the tensor `value` under `key` has for a parameter of that shape; None where nothing is known.

    Only a shape that is known can be judged: unknown classes and keys, scalars, preconditioners and quantised tensors are None.
    """
    rule = known(optimizer).rule(key)
    return shape_of(rule, value, shape) if rule is not None and isinstance(value, Tensor) else None


def _overridden(cls: type, base: type) -> str:
    """The first function of the base in which it computes and that the class does not share with it."""
    for name, function in vars(base).items():
        if name in HARMLESS or not inspect.isfunction(function):
            continue
        own = getattr(cls, name, None)
        if not inspect.isfunction(own) or inspect.unwrap(own) is not inspect.unwrap(function):
            return name
    return ""
