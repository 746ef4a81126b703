"""Which parameters an optimizer's groups hold, by name: what tells a fresh optimizer where new parameters belong.

An optimizer's own state dict is keyed by position. One that was made from the small model has the right groups but misses the
parameters of new modules; by the names of a checkpoint it holds the same ones in the same order as the one that was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from outgrow.errors import CheckpointError
from outgrow.history.cohorts import cohorts
from outgrow.model.journal import Journal

Names = list[list[str | int]]  # for each group: names, or positions of parameters that are not the model's among such


def names_in(optimizer: Optimizer, model: nn.Module) -> Names:
    """What each group holds."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result: Names = []
    for group in optimizer.param_groups:
        strangers = [id(parameter) for parameter in group["params"] if id(parameter) not in names]
        result.append([names.get(id(parameter), -1) for parameter in group["params"]])
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in strangers:
                result[-1][position] = strangers.index(id(parameter))
    return result


def regroup(optimizer: Optimizer, model: nn.Module, wanted: Sequence[Sequence[str | int]], journal: Journal) -> None:
    """Make an optimizer's groups hold what those of the saved one held; CheckpointError if it is not made alike."""
    kind = type(optimizer).__name__
    if len(wanted) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{kind} has {len(optimizer.param_groups)} parameter groups, and the checkpoint {len(wanted)}: make it as before"
        )
    parameters, births = dict(model.named_parameters()), cohorts(model).births
    own = {id(parameter) for parameter in parameters.values()}
    for number, (group, names) in enumerate(zip(optimizer.param_groups, wanted, strict=True)):
        strangers = [parameter for parameter in group["params"] if id(parameter) not in own]
        known: dict[Any, Tensor] = {**parameters, **dict(enumerate(strangers))}
        here = {id(parameter) for parameter in group["params"]}
        missing = [  # those of new modules are given to it
            name for name in names if name not in known or (id(known[name]) not in here and not births[str(name)].whole)
        ]
        left = {
            id(p): name for name, p in parameters.items() if any(p is held for held in group["params"]) and name not in names
        }
        if missing or left:
            which = f"{missing[0]} is missing" if missing else f"{next(iter(left.values()))} was in none such"
            raise CheckpointError(
                f"group {number} of {kind} does not hold what the saved one held ({which}): make it as before"
            )
        held = group["params"]
        journal.note(partial(group.__setitem__, "params", held))
        group["params"] = [known[name] for name in names]
        if "param_names" in group:
            before = dict(zip(map(id, held), group["param_names"], strict=True))
            journal.note(partial(group.__setitem__, "param_names", group["param_names"]))
            group["param_names"] = [name if isinstance(name, str) else before.get(id(known[name]), "") for name in names]


def keep(optimizer: Optimizer, journal: Journal) -> None:
    """Note how an optimizer was, before a state is loaded into it: that puts new groups and a new state in place of the old."""
    groups, state = optimizer.param_groups, optimizer.state
    journal.note(lambda: vars(optimizer).update(param_groups=groups, state=state))
