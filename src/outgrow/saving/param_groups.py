"""The parameters of an optimizer's groups by name, from which a new optimizer gets the parameters of new modules.

An optimizer's own state dict is keyed by position. An optimizer that was made from the small model has the right groups, but
not the parameters of new modules. With the names from a checkpoint, it gets the parameters of the saved one, in its order.
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

Names = list[list[str | int]]  # per group: a parameter's name or, if it is not part of the model, its index among such


def names_in(optimizer: Optimizer, model: nn.Module) -> Names:
    """The parameters of each group, by name or index."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    result: Names = []
    for group in optimizer.param_groups:
        foreign = [id(parameter) for parameter in group["params"] if id(parameter) not in names]
        result.append([names.get(id(parameter), -1) for parameter in group["params"]])
        for position, parameter in enumerate(group["params"]):
            if id(parameter) in foreign:
                result[-1][position] = foreign.index(id(parameter))
    return result


def regroup(optimizer: Optimizer, model: nn.Module, wanted: Sequence[Sequence[str | int]], journal: Journal) -> None:
    """Give an optimizer's groups the parameters of the saved one's; CheckpointError if its groups do not match."""
    kind = type(optimizer).__name__
    if len(wanted) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{kind} has {len(optimizer.param_groups)} parameter groups, and the checkpoint {len(wanted)}: make as many groups"
        )
    parameters, births = dict(model.named_parameters()), cohorts(model).births
    own = {id(parameter) for parameter in parameters.values()}
    for number, (group, names) in enumerate(zip(optimizer.param_groups, wanted, strict=True)):
        foreign = [parameter for parameter in group["params"] if id(parameter) not in own]
        known: dict[Any, Tensor] = {**parameters, **dict(enumerate(foreign))}
        here = {id(parameter) for parameter in group["params"]}
        missing = [  # parameters of new modules are added below
            name for name in names if name not in known or (id(known[name]) not in here and not births[str(name)].whole)
        ]
        left = {
            id(p): name for name, p in parameters.items() if any(p is held for held in group["params"]) and name not in names
        }
        if missing or left:
            which = f"{missing[0]} is missing" if missing else f"{next(iter(left.values()))} was not in it"
            raise CheckpointError(
                f"group {number} of {kind} does not hold the parameters of the saved group ({which}): make it in the same way"
            )
        held = group["params"]
        journal.note(partial(group.__setitem__, "params", held))
        group["params"] = [known[name] for name in names]
        if "param_names" in group:
            before = dict(zip(map(id, held), group["param_names"], strict=True))
            journal.note(partial(group.__setitem__, "param_names", group["param_names"]))
            group["param_names"] = [name if isinstance(name, str) else before.get(id(known[name]), "") for name in names]


def keep(optimizer: Optimizer, journal: Journal) -> None:
    """Let a journal restore an optimizer's groups and state; `load_state_dict` replaces both by new objects."""
    groups, state = optimizer.param_groups, optimizer.state
    journal.note(lambda: vars(optimizer).update(param_groups=groups, state=state))
