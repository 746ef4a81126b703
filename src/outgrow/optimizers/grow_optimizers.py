"""Grow the state of optimizers with the edits that grew their parameters.

The rule of each state key is known for the class of the optimizer (`optimizers/known_classes.py`,
`optimizers/register_optimizer.py`). An unknown class, an unknown key, or tensors outside `optimizer.state` are refused before
anything in the optimizer changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outgrow.apply.collected_writes import Writes
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.errors import OptimizerError, Problem
from outgrow.growth_plan.plan import Edit, Insertion, Plan
from outgrow.model.journal import Journal
from outgrow.optimizers.factored import axes_of, refactored
from outgrow.optimizers.grow_state import grown_state, has_tensors, keeps_old_entries, obstacle, state_tensors_in
from outgrow.optimizers.lookup import Known, known, name_of, refused_setting, way_out, weights_of
from outgrow.optimizers.quantised import decoded, encoded, is_encoded
from outgrow.optimizers.wrappers import NEW_ONE, TRANSPARENT, held_by, layers_of, unwrapped

NOT_SEARCHED = frozenset({"state", "param_groups", "defaults", "name2qmap"})  # the last are the codes of bitsandbytes


def check_optimizers(optimizers: Sequence[Any], model: nn.Module, plan: Plan, olds: Mapping[int, Tensor] | None = None) -> None:
    """Raise one error with all reasons why optimizers can't follow a plan; nothing changes.

    Args:
        olds: the parameters before the growth, by id, if the plan has been carried out already.
    """
    _check(optimizers, dict(model.named_parameters()), plan, olds)


def _check(optimizers: Sequence[Any], tensors: Mapping[str, Tensor], plan: Plan, olds: Mapping[int, Tensor] | None) -> None:
    names = {id(tensor): name for name, tensor in tensors.items()}
    edits = edits_by_tensor(plan)
    problems = [*unknown_wrappers(optimizers), *_unfading(optimizers, plan)]
    for optimizer in unwrapped(optimizers):
        held = [parameter for parameter in held_by(optimizer) if id(parameter) in names]
        if not held:
            reason = "this optimizer belongs to another model: it holds none of this one's parameters"
            instead = "pass the optimizer that was made from model.parameters(), or make a new optimizer after the growth"
            problems.append(Problem(type(optimizer).__name__, reason, instead))
        changed = [parameter for parameter in held if names[id(parameter)] in edits]
        whole = refusal(optimizer) if changed else None
        if whole is not None:
            problems.append(whole)
            continue
        about = known(optimizer)
        for parameter in changed:
            name, shape = names[id(parameter)], (parameter if olds is None else olds[id(parameter)]).shape
            problems += _problems(optimizer, about, parameter, name, tuple(shape), edits[name])
    if problems:
        raise OptimizerError("an optimizer can't follow the growth", problems)


def unknown_wrappers(optimizers: Sequence[Any]) -> list[Problem]:
    """Problems with unknown wrappers: they share the state of the wrapped optimizer, and may keep more elsewhere."""
    seen = {id(optimizer) for optimizer in unwrapped(optimizers)}
    layers = [layer for given in optimizers for layer in layers_of(given)[:-1] if isinstance(layer, Optimizer)]
    others = [layer for layer in layers if id(layer) not in seen and name_of(type(layer)) not in TRANSPARENT]
    return [Problem(type(one).__name__, about.refusal, way_out(one)) for one in others if (about := known(one)).refusal]


def _unfading(optimizers: Sequence[Any], plan: Plan) -> list[Problem]:
    """Problems with a fade, which adds to the parameters between steps: optimizers that keep weights of their own."""
    if not any(isinstance(edit, Insertion) and edit.fade for edit in plan.edits):
        return []
    kept = [(type(optimizer).__name__, weights_of(optimizer)) for optimizer in unwrapped(optimizers)]
    reason = "it mixes the parameters with weights of its own ({!r}), which values that fade in would not reach"
    return [Problem(kind, reason.format(key), "leave fade= out") for kind, key in kept if key]


def refusal(optimizer: Optimizer) -> Problem | None:
    """Why an optimizer can't follow any growth of its parameters; None if it can, or has no state yet."""
    kind, about = type(optimizer).__name__, known(optimizer)
    outside = _outside(optimizer)
    if about.refusal:
        stepped = any(optimizer.state.values()) or getattr(optimizer, "_numel_cache", None) is not None
        return Problem(kind, about.refusal, way_out(optimizer)) if stepped or outside else None
    if outside:
        return Problem(kind, f"it keeps tensors outside of its state, in its attribute {outside!r}", NEW_ONE)
    return None


def _problems(
    optimizer: Optimizer, about: Known, parameter: Tensor, name: str, shape: tuple[int, ...], edits: Sequence[Edit]
) -> list[Problem]:
    kind, state = type(optimizer).__name__, optimizer.state.get(parameter, {})
    if not state:
        return []
    if about.no_copies and not keeps_old_entries(edits):
        instead = f"a method that adds units without copying or rescaling (r2r, netmorph), or {NEW_ONE}"
        return [Problem(name, f"{kind} can't follow units that are copies or rescaled: {about.no_copies}", instead)]
    return state_problems(optimizer, parameter, name, shape, edits)


def state_problems(
    optimizer: Optimizer, parameter: Tensor, name: str, shape: tuple[int, ...], edits: Sequence[Edit] = ()
) -> list[Problem]:
    """Problems with the state of one parameter. shape: that of the parameter for which the state was made."""
    kind, about = type(optimizer).__name__, known(optimizer)
    by_setting = refused_setting(optimizer, parameter)
    if by_setting:
        return [Problem(name, f"{kind}'s state can't grow: {by_setting}", NEW_ONE)]
    axes = axes_of(optimizer, about.name, parameter, shape)
    plain_state = decoded(optimizer, parameter, optimizer.state.get(parameter, {}))
    found = [(key, obstacle(about, key, value, shape, edits, axes)) for key, value in plain_state.items()]
    return [Problem(name, f"{kind}'s state {key!r} {reason}", NEW_ONE) for key, reason in found if reason]


def _outside(optimizer: Optimizer) -> str:
    """The first attribute that holds tensors other than parameters and scalars; empty if there is none."""
    own = {id(parameter) for parameter in held_by(optimizer)}
    for name, value in vars(optimizer).items():
        if name in NOT_SEARCHED or name.startswith("_optimizer_"):
            continue
        if any(tensor.numel() > 1 and id(tensor) not in own for tensor in state_tensors_in(value)):
            return name
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params" and has_tensors(value):
                return f"param_groups[…][{name!r}]"
    return next((str(key) for key, value in optimizer.state.items() if not isinstance(key, Tensor) and has_tensors(value)), "")


@torch.no_grad()
def grow_optimizers(
    optimizers: Sequence[Any], tensors: Mapping[str, Tensor], plan: Plan, olds: Mapping[int, Tensor], journal: Journal
) -> None:
    """Grow the state of optimizers whose parameters have just grown.

    tensors: the model's tensors by name. olds: their values before the growth, by id.
    """
    _check(optimizers, tensors, plan, olds)
    edits = edits_by_tensor(plan)
    names = {id(tensors[name]): name for name in edits}
    writes = Writes()
    for optimizer in unwrapped(optimizers):
        about = known(optimizer)
        before: dict[str, Mapping[Any, Any]] = {}
        if any(rule.kind == "weights" for rule in about.rules.values()):
            before = {name: dict(optimizer.state.get(tensors[name], {})) for name in tensors}

        def beside(key: Any, name: str, before: Mapping[str, Mapping[Any, Any]] = before) -> Tensor:
            value = before.get(name, {}).get(key)
            old = olds[id(tensors[name])]
            return value.view(old.shape) if isinstance(value, Tensor) and value.numel() == old.numel() else old

        for parameter in held_by(optimizer):
            state = optimizer.state.get(parameter)
            if not state or id(parameter) not in names:
                continue
            shape = tuple(olds[id(parameter)].shape)
            plain_state = decoded(optimizer, parameter, state)
            axes, now = (axes_of(optimizer, about.name, parameter, size) for size in (shape, parameter.shape))
            later = None if about.factors or is_encoded(optimizer, state) else writes  # those read the grown values
            new = grown_state(about, plain_state, parameter, shape, edits[names[id(parameter)]], axes, beside, later)
            new, gone = refactored(about.name, new, about.factors, axes, now)
            fresh = [key for key in state if (rule := about.rule(key)) is not None and rule.kind == "fresh"]
            _put(state, encoded(optimizer, parameter, state, new), [*fresh, *gone], journal)
            writes.make_if_many()
    writes.make()


def _put(state: dict[Any, Any], new: Mapping[Any, Any], dropped: Sequence[Any], journal: Journal) -> None:
    before = dict(state)

    def put_back() -> None:
        state.clear()
        state.update(before)

    journal.note(put_back)
    state.update(new)
    for key in dropped:
        del state[key]
