"""Read optimizers that were not passed to outgrow, without any effect on them.

Torch calls global step hooks for every optimizer of the process. Some optimizers skip `Optimizer.__init__`, have no parameter
groups or state, compute them in a property, or can't be hashed or referenced weakly. If a field can't be read, it counts as
empty: a hook must never make the step of an unrelated optimizer fail.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

SEARCHED = 8  # parameters used in the search for the state of unknown optimizers


def held_parameters(optimizer: Any) -> list[Tensor]:
    """The tensors in an optimizer's groups; none if they can't be read.

    Example:
        >>> held_parameters(object())
        []
    """
    try:
        return [tensor for group in optimizer.param_groups for tensor in group["params"] if isinstance(tensor, Tensor)]
    except Exception:
        return []


def state_of(optimizer: Any, parameter: Tensor) -> Mapping[str, Any]:
    """The state that an optimizer has for a parameter; empty if there is none, or if it can't be read."""
    try:
        state = optimizer.state.get(parameter)
        return state if isinstance(state, Mapping) else {}
    except Exception:
        return {}


def states_with(parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Mapping[Any, Any], Mapping[str, Any]]]:
    """All dicts of the process that have state for some of these parameters, as an optimizer's `state` does.

    Yields the parameter, the dict, and the state of the parameter. The search visits all objects, 0.05 s per 500,000.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    for holder in gc.get_referrers(*parameters[:SEARCHED]):  # each one makes the search slower
        if not issubclass(type(holder), dict):
            continue
        for key, entry in list(holder.items()):
            if id(key) in wanted and isinstance(entry, Mapping):
                yield wanted[id(key)], holder, entry


class WeakNotes:
    """One value per object, by identity. Objects that can't be referenced weakly get none; no object is kept alive."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[ref[Any], Any]] = {}

    def __len__(self) -> int:
        return len(self._notes)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for pointer, note in list(self._notes.values()):
            if (thing := pointer()) is not None:
                yield thing, note

    def get(self, thing: Any, default: Any = None) -> Any:
        found = self._notes.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else default

    def put(self, thing: Any, note: Any) -> None:
        key = id(thing)

        def forget(dead: ref[Any]) -> None:
            found = self._notes.get(key)
            if found is not None and found[0] is dead:
                del self._notes[key]

        try:
            self._notes[key] = ref(thing, forget), note
        except TypeError:
            return

    def clear(self) -> None:
        self._notes.clear()
