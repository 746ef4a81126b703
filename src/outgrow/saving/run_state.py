"""The complete state of a run, as one dict of plain values and tensors.

It holds the model (with its growth history), optimizers (with the names of their parameters), schedulers, averaged copies,
other objects with a state, and the random states of Python, numpy and torch. `torch.load(weights_only=True)` can read it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from outgrow.errors import CheckpointError
from outgrow.model.journal import Journal
from outgrow.model.sandbox import tensors_of
from outgrow.model.unwrap import bare
from outgrow.modules.gates import gates_of, restore_gates, share_gates
from outgrow.saving.extra_state import note_extras
from outgrow.saving.growth_record import VERSION, check_version
from outgrow.saving.growths_in_state_dict import PREFIX, growth_entries, unpack
from outgrow.saving.param_groups import keep, names_in, regroup


@dataclass(frozen=True, eq=False)
class Parts:
    """The objects of a run that have a state."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any] = ()
    averages: Sequence[nn.Module] = ()
    also: Mapping[str, Any] = field(
        default_factory=dict
    )  # whatever has state_dict and load_state_dict, or is a torch.Generator


def pack(parts: Parts) -> dict[str, Any]:
    """The state of all parts; tensors are not copied."""
    model = bare(parts.model)
    return {
        "version": VERSION,
        "class": type(model).__qualname__,
        "kinds": _kinds(parts),
        "model": {**model.state_dict(), **growth_entries(model)},
        "averages": [average.state_dict() for average in parts.averages],
        "optimizers": [optimizer.state_dict() for optimizer in parts.optimizers],
        "groups": [names_in(optimizer, model) for optimizer in parts.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in parts.schedulers],
        "also": {name: _state(part) for name, part in parts.also.items()},
        "random": random_states(),
    }


def restore(parts: Parts, state: Mapping[str, Any], journal: Journal) -> None:
    """Load the state of all parts; first, the model gets its shapes.

    Raises CheckpointError if the parts do not match the saved ones; the journal then undoes what was done.
    """
    check_version(state.get("version"), "the checkpoint")
    for what, here in (("optimizers", parts.optimizers), ("schedulers", parts.schedulers), ("averages", parts.averages)):
        if len(state[what]) != len(here):
            raise CheckpointError(f"there are {len(here)} {what}, and the checkpoint has {len(state[what])}: pass as many")
    if set(state["also"]) != set(parts.also):
        raise CheckpointError(
            f"also= holds {sorted(parts.also)}, and the checkpoint {sorted(state['also'])}: pass objects of the same names"
        )
    for name, kind in _kinds(parts).items():
        if state["kinds"][name] != kind:
            found = f"{name} is of type {kind}, and in the checkpoint {state['kinds'][name]}"
            raise CheckpointError(f"{found}: make it of the same type")
    model = bare(parts.model)
    levels = {place: (gate.done, gate.steps) for place, gate in gates_of(model).items()}
    journal.note(lambda: _restore_gates(parts, levels))
    load_weights(model, dict(state["model"]), journal)
    for average, saved in zip(parts.averages, state["averages"], strict=True):
        inner = getattr(average, "module", average)
        prefix = "module." if inner is not average else ""
        kept = {f"{prefix}{name}": value for name, value in state["model"].items() if name.startswith(PREFIX)}
        load_weights(average, {**saved, **kept}, journal, averaged=True)
    for average in parts.averages:
        share_gates(model, getattr(average, "module", average))
    for optimizer, saved, names in zip(parts.optimizers, state["optimizers"], state["groups"], strict=True):
        regroup(optimizer, model, names, journal)
        keep(optimizer, journal)
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(parts.schedulers, state["schedulers"], strict=True):
        before = copy.deepcopy(scheduler.state_dict())
        journal.note(lambda scheduler=scheduler, before=before: scheduler.load_state_dict(before))  # type: ignore[misc]
        scheduler.load_state_dict(saved)
    for name, part in parts.also.items():
        before = copy.deepcopy(_state(part))
        journal.note(lambda part=part, before=before: _set_state(part, before))  # type: ignore[misc]
        _set_state(part, state["also"][name])
    now = random_states()
    journal.note(lambda: set_random_states(now))
    set_random_states(state["random"])


def _kinds(parts: Parts) -> dict[str, str]:
    """Types by name. They are compared, since the state of one type of optimizer or scheduler loads into another silently."""
    lists = {"optimizer": parts.optimizers, "scheduler": parts.schedulers}
    named = {f"{what} {number}": one for what, all_ in lists.items() for number, one in enumerate(all_)}
    return {name: type(part).__name__ for name, part in (*named.items(), *parts.also.items())}


def _restore_gates(parts: Parts, levels: Mapping[str, tuple[int, int]]) -> None:
    """Restore the progress of fades, after the journal has restored the model's modules."""
    restore_gates(bare(parts.model), levels)
    for average in parts.averages:
        share_gates(bare(parts.model), getattr(average, "module", average))


def load_weights(model: nn.Module, state: dict[str, Any], journal: Journal, averaged: bool = False) -> None:
    """Load a state dict with growth entries; the journal can restore values and the progress of fades, after the shapes."""
    levels = {place: (gate.done, gate.steps) for place, gate in gates_of(model).items()}
    journal.note(lambda: restore_gates(model, levels))
    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    journal.note(lambda: _copy_back(model, before))
    note_extras(model, journal)
    inner = getattr(model, "module", model) if averaged else model
    unpack(inner, state, journal, "" if inner is model else "module.", drifting=not averaged)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit this model: {error}") from error


def _copy_back(model: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(before[name])


def _state(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
        raise CheckpointError(
            f"also= holds the type {type(part).__name__}, which can't be saved: it has no state_dict and load_state_dict"
        )
    return part.state_dict()


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    else:
        part.load_state_dict(state)


def random_states() -> dict[str, Any]:
    """The random states of Python, numpy, torch and its devices."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *map(float, rest)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
