"""Calls of a model's submodules while it runs on the example, with their inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from outgrow.model.example import Example, call, is_cache
from outgrow.model.example_errors import does_not_run
from outgrow.model.sandbox import untouched
from outgrow.model.walk_modules import set_mode


@dataclass(frozen=True, eq=False)
class Call:
    """The input and output of a module in a forward pass."""

    example: Example
    output: Any


def calls_of(model: nn.Module, example: Example, paths: Sequence[str], training: bool = False) -> dict[str, list[Call]]:
    """All calls of some modules in one forward pass, copied, since in-place code may change their inputs and outputs."""
    found: dict[str, list[Call]] = {path: [] for path in paths}
    given: dict[str, list[Example]] = {path: [] for path in paths}

    def listen(path: str, module: nn.Module) -> list[Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            given[path].append(_copied(_bound(module, args, kwargs)))

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found[path].append(Call(given[path].pop(), _copied(output)))

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    handles: list[Any] = []
    try:
        with untouched(model), torch.no_grad():
            set_mode(model, training)
            for path in paths:
                handles += listen(path, model.get_submodule(path))
            call(model, example)
    except Exception as error:
        raise does_not_run(model, example, error) from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _copied(tree: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, tree)


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """Arguments as an example: by position if possible, else by name. Caches, which store this pass, are left out."""
    args, kwargs = tuple(map(_uncached, args)), {name: _uncached(value) for name, value in kwargs.items()}
    if not kwargs:
        return args
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return named


def _uncached(value: Any) -> Any:
    """A list or dict copied, since the model's code may add to it later; None for a cache."""
    if type(value) in (list, dict):
        return type(value)(value)
    return None if is_cache(value) else value
