"""Find which parameter each number of an optimizer's file stands for, and the rules of its state.

A state dict of torch numbers the parameters group by group and does not name them. The Trainer makes two groups in the order of
`named_parameters()`: those with weight decay, and those without (biases and norms). An optimizer that a user made from
`model.parameters()` has one group. A match is accepted only if the groups have as many parameters, and every state has the
shape of its parameter. Names in the file (`param_names`) decide if there are any.

The class of the optimizer is not in the file either. It is recognised by its settings and the keys of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outgrow.checkpoints.build_on_meta import library
from outgrow.checkpoints.optimizer_file import OptimizerFile
from outgrow.checkpoints.read_checkpoint import StoredTensor
from outgrow.errors import CheckpointError, Problem
from outgrow.optimizers.known_torch import TORCH
from outgrow.optimizers.state_rules import WORDS, StateRule

Groups = list[list[str]]
OF_OTHERS = ("params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
ADDED_LATER = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"})
FOLLOWED = ("entries", "scalar")
IN_TRAINING = "grow during training instead, with the callback outgrow.transformers.Grow, which knows the optimizer itself"


def trainer_groups(model: nn.Module) -> Groups:
    """The groups that a Trainer makes: parameters with weight decay, and those without."""
    trainer: Any = library().Trainer
    decayed = set(trainer.get_decay_parameter_names(None, model))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [[name for name in names if name in decayed], [name for name in names if name not in decayed]]


def one_group(model: nn.Module) -> Groups:
    """The group of an optimizer that is made from `model.parameters()`."""
    return [[name for name, _ in model.named_parameters()]]


SCHEMES: tuple[Callable[[nn.Module], Groups], ...] = (trainer_groups, one_group)


def names_of(file: OptimizerFile, model: nn.Module, rules: Mapping[str, StateRule]) -> Groups:
    """The names of an optimizer's parameters, group by group; CheckpointError if they can't be known.

    model: from before the growth, on the meta device. rules: of the keys of the state.
    """
    scalars = frozenset(key for key, rule in rules.items() if rule.kind == "scalar")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if any("param_names" in group for group in file.groups):
        named = [list(map(str, group.get("param_names", ()))) for group in file.groups]
        problems = _misfits(file, named, shapes, scalars)
        if problems:
            raise CheckpointError(f"{file.path} belongs to another model", problems[:5])
        return named
    best: list[Problem] = []
    for scheme in SCHEMES:
        groups = scheme(model)
        problems = _misfits(file, groups, shapes, scalars)
        if not problems:
            return groups
        best = problems if not best or len(groups) == len(file.groups) else best
    raise CheckpointError(
        f"{file.path}: its parameters are not those of this model as a Trainer groups them (it belongs to another model, some "
        f"parameters were frozen, or the optimizer was made in another way): {IN_TRAINING}",
        best[:5],
    )


def _misfits(
    file: OptimizerFile, groups: Groups, shapes: Mapping[str, tuple[int, ...]], scalars: frozenset[str]
) -> list[Problem]:
    """Why parameters can't be those of the file."""
    if [len(group) for group in groups] != file.counts:
        return [Problem("", f"its groups have {_listed(file.counts)} parameters, the model's {_listed(map(len, groups))}")]
    problems = []
    for number, name in enumerate(name for group in groups for name in group):
        if name not in shapes:
            problems.append(Problem(name, "the model has no such parameter"))
            continue
        for key, value in file.state.get(number, {}).items():
            if isinstance(value, StoredTensor) and key not in scalars and value.shape != shapes[name]:
                problems.append(Problem(name, f"its state {key!r} has the shape {value.shape} instead of {shapes[name]}"))
    return problems


def _listed(counts: Any) -> str:
    return " and ".join(map(str, counts)) or "no"


def rules_of(file: OptimizerFile) -> dict[str, StateRule]:
    """How the state under each key grows; CheckpointError if the class of the optimizer is not recognised."""
    keys = {key for state in file.state.values() for key in state}
    settings = {key for group in file.groups for key in group if key not in OF_OTHERS}
    found: list[dict[str, StateRule]] = []
    for name, words in TORCH.items():
        if keys <= words.keys() and _has_settings(name.partition(".")[2], settings):
            rules = {key: WORDS[words[key]] for key in keys}
            found += [rules] if rules not in found else []
    if len(found) == 1 and all(rule.kind in FOLLOWED for rule in found[0].values()):
        return found[0]
    raise CheckpointError(
        f"{file.path}: the class of the optimizer is not recognised by its settings ({', '.join(sorted(settings))}) and its "
        f"state ({', '.join(sorted(keys)) or 'none'}), so its state can't be grown on the disk: {IN_TRAINING}"
    )


def _has_settings(name: str, settings: set[str]) -> bool:
    """Whether a class of torch.optim has these settings, apart from those that were added in later versions of torch."""
    kind: Any = getattr(torch.optim, name, None)
    if kind is None:
        return False
    try:
        made = kind([nn.Parameter(torch.zeros(2, 2))])
    except (TypeError, ValueError, RuntimeError):
        return False
    own = set(made.param_groups[0]) - set(OF_OTHERS)
    return settings <= own and own - settings <= ADDED_LATER


def grown_groups(groups: Groups, model: nn.Module, origins: Mapping[str, str]) -> Groups:
    """The groups of the grown model. origins: for each of its parameters, the old parameter that it is derived from.

    Each parameter is in the group of its origin, in the order of `named_parameters()`, as a new optimizer would have it.
    """
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    found: Groups = [[] for _ in groups]
    for name, _ in model.named_parameters():
        origin = origins.get(name)
        if origin in group_of:
            found[group_of[str(origin)]].append(name)
    return found


def check_order(groups: Groups, model: nn.Module, path: str) -> None:
    """Raise unless the parameters of each group are in the order of the model, in which the grown ones are written."""
    place = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for group in groups:
        if group != sorted(group, key=lambda name: place[name]):
            raise CheckpointError(f"{path}: the parameters of a group are not in the order of the model: {IN_TRAINING}")


def numbered(groups: Sequence[Mapping[str, Any]], names: Groups) -> list[dict[str, Any]]:
    """The settings of all groups with the numbers of their new parameters."""
    found, first = [], 0
    for group, own in zip(groups, names, strict=True):
        new = {**group, "params": list(range(first, first + len(own)))}
        if "param_names" in group:
            new["param_names"] = list(own)
        found.append(new)
        first += len(own)
    return found
