"""Find what is known of an optimizer: by its exact class, or by the class that it takes all of its arithmetic from.

A subclass is known like its base as long as it overrides none of the functions in which the base computes. One that overrides
`step` may keep anything under the same keys, and has to be registered.
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
from outgrow.optimizers.known_classes import KNOWN, NO_COPIES, REFUSED, SEVERAL_SHAPES, WRAPPED
from outgrow.optimizers.register import FOUND, registered
from outgrow.optimizers.state_rules import WORDS, Shape, StateRule, shape_of
from outgrow.optimizers.wrappers import NEW_ONE, TRANSPARENT, layers_of

HARMLESS = frozenset(
    {"__init__", "__repr__", "__str__", "__setstate__", "__getstate__", "zero_grad", "state_dict", "load_state_dict"}
)


@dataclass(frozen=True)
class Known:
    """What is known of a class: a rule for each key (or pattern of keys), or why it can't follow a growth."""

    name: str = ""  # package and class
    rules: Mapping[str, StateRule] = field(default_factory=dict)
    refusal: str = ""
    no_copies: str = ""  # why it can't follow methods that copy or rescale units

    def rule(self, key: Any, beside: Iterable[Any] = ()) -> StateRule | None:
        """The rule of a key of the state, in a state that has those other keys beside it; None if there is none."""
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
        if key in WRAPPED:
            return WORDS[WRAPPED[key]]
        return next((rule for pattern, rule in self.rules.items() if isinstance(key, str) and fnmatchcase(key, pattern)), None)

    @cached_property
    def _found(self) -> dict[tuple[Any, tuple[Any, ...]], StateRule | None]:
        """Rules that were searched for: the same keys come with every parameter."""
        return {}

    @cached_property
    def factors(self) -> list[tuple[str, str]]:
        """Keys of the row and column means that belong together."""
        rows, columns = (
            [key for key, rule in self.rules.items() if rule.word == word] for word in ("row means", "column means")
        )
        return list(zip(rows, columns, strict=True))

    @property
    def counts_apart(self) -> bool:
        """Whether steps are counted for each parameter, so that one without state starts at the beginning."""
        return any(rule.word == "step count" for rule in self.rules.values())


def known(optimizer: Optimizer) -> Known:
    """What is known of an optimizer's class; for an unknown class a refusal that says so."""
    cls = type(optimizer)
    if cls not in FOUND:
        FOUND[cls] = _search(cls)
    found: Known = FOUND[cls]
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
            reason = f"it overrides {base.__name__}.{changed}, so what it keeps in its state is not known"
            return Known(refusal=reason)
        return Known(name, refusal=REFUSED[name]) if rules is None else Known(name, rules, no_copies=NO_COPIES.get(name, ""))
    return Known(refusal=f"{cls.__module__}.{cls.__qualname__} is none of the classes whose state outgrow knows")


def name_of(cls: type) -> str:
    """The package and the class: libraries move classes between their files."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def unfollowable(optimizer: Any) -> str:
    """Why an optimizer's state can't follow a growth, judged by its class alone, before there is any state; "" if it can.

    Wrappers count with what they wrap; those of trainers add nothing.
    """
    layers = [
        layer for layer in layers_of(optimizer) if isinstance(layer, Optimizer) and name_of(type(layer)) not in TRANSPARENT
    ]
    return next((about.refusal for layer in layers if (about := known(layer)).refusal), "")


def weights_of(optimizer: Optimizer) -> str:
    """The key under which an optimizer keeps weights that it mixes with the parameters; "" if it keeps none.

    What changes a parameter from outside, between two steps, does not reach these. ASGD's average is only read, and so is what
    Prodigy keeps of the start.
    """
    rules = known(optimizer).rules
    return next((key for key, rule in rules.items() if rule.kind == "weights" and key not in ("ax", "p0", "prev_param")), "")


def way_out(optimizer: Any) -> str:
    """What to do about an optimizer that can't follow."""
    name = name_of(type(optimizer))
    register = f"describe its state: outgrow.register_optimizer({type(optimizer).__name__}, {{'exp_avg': 'first moment', …}})"
    return NEW_ONE if name in REFUSED else f"{register}; or {NEW_ONE}"


def state_shape(optimizer: Any, key: Any, value: Any, shape: Shape) -> Shape | None:
    """The shape that the tensor `value` under `key` has for a parameter of that shape; None where nothing is known.

    Only a shape that is known can be judged: unknown classes and keys, scalars, preconditioners and quantised tensors are None.
    """
    about = known(optimizer)
    rule = about.rule(key)
    if rule is None or not isinstance(value, Tensor) or about.name in SEVERAL_SHAPES:
        return None
    return shape_of(rule, value, shape, axes_of(optimizer, about.name, None, shape))


def _overridden(cls: type, base: type) -> str:
    """The first function of the base, or of what it derives from, in which it computes and that the class does not share."""
    kinds = [kind for kind in base.__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        function = getattr(base, name)
        if name in HARMLESS or not inspect.isfunction(function):
            continue
        own = getattr(cls, name, None)
        if not inspect.isfunction(own) or inspect.unwrap(own) is not inspect.unwrap(function):
            return name
    return ""
