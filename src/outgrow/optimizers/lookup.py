"""Find the state rules of an optimizer: by its exact class, or by the base class that does all of its arithmetic.

A subclass has the rules of its base as long as it overrides none of the functions in which the base computes. A subclass that
overrides `step` may keep anything under the same keys, and has to be registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from outgrow.optimizers.factored import axes_of
from outgrow.optimizers.known_classes import KNOWN, NO_COPIES, REFUSED, REFUSED_SETTINGS, SHAPES_BY_SETTING, WRAPPER_KEYS
from outgrow.optimizers.register_optimizer import LOOKUP_CACHE, registered
from outgrow.optimizers.state_rules import WORDS, Shape, StateRule, shape_of
from outgrow.optimizers.wrappers import NEW_ONE, TRANSPARENT, layers_of

NO_ARITHMETIC = frozenset(
    {"__init__", "__repr__", "__str__", "__setstate__", "__getstate__", "zero_grad", "state_dict", "load_state_dict"}
)


@dataclass(frozen=True)
class Known:
    """The entry of an optimizer class: a rule for each key (or pattern of keys), or why it can't follow a growth."""

    name: str = ""  # package and class
    rules: Mapping[str, StateRule] = field(default_factory=dict)
    refusal: str = ""
    no_copies: str = ""  # why it can't follow methods that copy or rescale units

    def rule(self, key: Any, beside: Iterable[Any] = ()) -> StateRule | None:
        """The rule of a state key; None if there is none. beside: all keys of this state, since a rule may depend on others."""
        place = key, tuple(beside)
        if place not in self._found:
            self._found[place] = self._search(*place)
        return self._found[place]

    def _search(self, key: Any, beside: tuple[Any, ...]) -> StateRule | None:
        special = next((self.rules[name] for other in beside if (name := f"{key} beside {other}") in self.rules), None)
        if special is not None:
            return special
        if key in self.rules:
            return self.rules[key]
        if key in WRAPPER_KEYS:
            return WORDS[WRAPPER_KEYS[key]]
        return next((rule for pattern, rule in self.rules.items() if isinstance(key, str) and fnmatchcase(key, pattern)), None)

    @cached_property
    def _found(self) -> dict[tuple[Any, tuple[Any, ...]], StateRule | None]:
        """A cache of rules by key: every parameter has the same keys."""
        return {}

    @cached_property
    def factors(self) -> list[tuple[str, str]]:
        """Pairs of keys: row means and the column means that belong to them."""
        rows, columns = (
            [key for key, rule in self.rules.items() if rule.word == word] for word in ("row means", "column means")
        )
        return list(zip(rows, columns, strict=True))

    @property
    def counts_per_parameter(self) -> bool:
        """Whether steps are counted per parameter, so that a parameter without state starts at step zero."""
        return any(rule.word == "step count" for rule in self.rules.values())


def known(optimizer: Optimizer) -> Known:
    """The entry of an optimizer's class; for an unknown class, one with a refusal."""
    cls = type(optimizer)
    if cls not in LOOKUP_CACHE:
        LOOKUP_CACHE[cls] = _search(cls)
    found: Known = LOOKUP_CACHE[cls]
    return found


def _search(cls: type) -> Known:
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
            reason = f"it overrides {base.__name__}.{changed}, so that the meaning of its state is not known"
            return Known(refusal=reason)
        return Known(name, refusal=REFUSED[name]) if rules is None else Known(name, rules, no_copies=NO_COPIES.get(name, ""))
    return Known(refusal=f"{cls.__module__}.{cls.__qualname__} is none of the classes whose state outgrow knows")


def name_of(cls: type) -> str:
    """The package and the class: libraries move classes between their files."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def unfollowable(optimizer: Any) -> str:
    """Why an optimizer's state can't follow a growth, judged by its class alone, before there is any state; "" if it can.

    A wrapper is judged together with the wrapped optimizer; wrappers of trainers are ignored.
    """
    layers = [
        layer for layer in layers_of(optimizer) if isinstance(layer, Optimizer) and name_of(type(layer)) not in TRANSPARENT
    ]
    return next((about.refusal for layer in layers if (about := known(layer)).refusal), "")


def refused_setting(optimizer: Optimizer, parameter: Tensor) -> str:
    """Why the settings of a parameter's group do not let its state follow a growth; "" if they do."""
    setting = REFUSED_SETTINGS.get(known(optimizer).name)
    if setting is None or setting.axes not in (None, parameter.ndim):
        return ""
    group = next((one for one in optimizer.param_groups if any(parameter is held for held in one["params"])), {})
    value = group.get(setting.key)
    return "" if value in setting.harmless else f"with {setting.key}={value!r}, {setting.reason}"


def weights_of(optimizer: Optimizer) -> str:
    """The key under which an optimizer keeps weights that it mixes with the parameters; "" if it keeps none.

    Changes of a parameter from outside, between two steps, do not reach these weights. ASGD's average and Prodigy's starting
    point do not count: they are not mixed into the parameters.
    """
    rules = known(optimizer).rules
    return next((key for key, rule in rules.items() if rule.kind == "weights" and key not in ("ax", "p0", "prev_param")), "")


def way_out(optimizer: Any) -> str:
    """What to do about an optimizer that can't follow."""
    name = name_of(type(optimizer))
    register = f"describe its state: outgrow.register_optimizer({type(optimizer).__name__}, {{'exp_avg': 'first moment', …}})"
    return NEW_ONE if name in REFUSED else f"{register}; or {NEW_ONE}"


def state_shape(optimizer: Any, key: Any, value: Any, shape: Shape) -> Shape | None:
    """The shape that the tensor `value` under `key` must have for a parameter of that shape; None where it is not known.

    It is not known for unknown classes and keys, scalars, preconditioners and quantised tensors.
    """
    about = known(optimizer)
    rule = about.rule(key)
    if rule is None or not isinstance(value, Tensor) or about.name in SHAPES_BY_SETTING:
        return None
    return shape_of(rule, value, shape, axes_of(optimizer, about.name, None, shape))


def _overridden(cls: type, base: type) -> str:
    """The first function with arithmetic, of the base or its own bases, that the class overrides; empty if there is none."""
    kinds = [kind for kind in base.__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        function = getattr(base, name)
        if name in NO_ARITHMETIC or not inspect.isfunction(function):
            continue
        own = getattr(cls, name, None)
        if not inspect.isfunction(own) or inspect.unwrap(own) is not inspect.unwrap(function):
            return name
    return ""
