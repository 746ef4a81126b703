"""Methods from outside the package: `outgrow.register_method`."""

from __future__ import annotations

import inspect
import re

from outgrow.errors import MethodError
from outgrow.methods.all_methods import BY_NAME
from outgrow.methods.base import REGISTERED, Method
from outgrow.methods.check_method import check_method
from outgrow.wrong_arguments import usage


@usage("outgrow.register_method('echo', Echo)")
def register_method(name: str, method: type[Method], replace: bool = False) -> None:
    """Give a method of your own a name: for `outgrow.widen(…, method="echo")`, schedules, schedule files and the command line.

    The name is valid for the process. "auto" does not try the method: it is used only if requested explicitly. In a schedule
    file, options are the fields of the class: `method = { name = "echo", scale = 0.5 }`.

    Args:
        name: letters, digits, "_" and "-"; none of the package's own names.
        method: a subclass of `outgrow.Method` that can be made without arguments.
        replace: whether a method that is registered under this name is replaced; refused otherwise.

    Example:
        >>> import outgrow, torch
        >>> from dataclasses import dataclass
        >>> from outgrow.extending import Draft, Recipe, Slot, State, Verdict, Volume, forced
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Twin(outgrow.Method):
        ...     state = State.ANY
        ...     def recipe(self, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
        ...         copy = Recipe("copy", draft.models, signs=(1.0,) * draft.new)
        ...         return (forced(slot, verdict, draft) if slot.role == "reads" else None) or copy
        >>> register_method("twin", Twin)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(outgrow.widen(model, torch.randn(1, 4), "0", to=10, method="twin").plan)
        volume  size    method
        ──────  ──────  ──────
        0       8 → 10  twin
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise MethodError(f"name={name!r}: write a word of letters, digits, '_' and '-', e.g. 'echo'")
    if name in BY_NAME:
        raise MethodError(f"{name!r} is a method of outgrow's own: choose another name")
    if isinstance(method, Method):
        kind = type(method).__name__
        raise MethodError(
            f"{method!r} is an instance: pass the class itself, register_method({name!r}, {kind}), and give options their "
            "defaults in the class"
        )
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise MethodError(f"{method!r} is not a method: pass a class that derives from outgrow.Method")
    if inspect.isabstract(method):
        missing = ", ".join(sorted(method.__abstractmethods__))
        raise MethodError(f"{method.__qualname__} can't be registered: it does not define {missing}")
    if name in REGISTERED and REGISTERED[name] is not method and not replace:
        there = f"{REGISTERED[name].__module__}.{REGISTERED[name].__qualname__}"
        raise MethodError(f"{name!r} is registered already, as {there}: register_method(…, replace=True) replaces it")
    before = dict(REGISTERED)
    REGISTERED[name] = method
    try:
        _check(name, method)
    except BaseException:
        REGISTERED.clear()
        REGISTERED.update(before)
        raise


def _check(name: str, method: type[Method]) -> None:
    """Check the method that its name stands for, with default options."""
    try:
        usual = method()
    except Exception as error:
        raise MethodError(
            f"{method.__qualname__} can't be registered: {method.__qualname__}() raised {type(error).__name__}: {error}. "
            "Give all its fields defaults"
        ) from error
    check_method(usual)
    if usual.name != name:
        raise MethodError(
            f"{method.__qualname__} can't be registered as {name!r}: its name property says {usual.name!r}, which is what "
            "reports would show. Leave the property out, or let both agree"
        )
