"""Grow the state that an optimizer keeps for one parameter, key by key, by the rule of each key.

Containers (lists, tuples, deques, dicts) of tensors grow item by item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outgrow.apply.collected_writes import Writes
from outgrow.apply.grow_tensor import fill_values, grown, grown_moment
from outgrow.growth_plan.plan import Edit, Insertion
from outgrow.optimizers.factored import Axes, grown_factors
from outgrow.optimizers.lookup import Known
from outgrow.optimizers.preconditioners import grown_matrix
from outgrow.optimizers.state_rules import PLAIN, Shape, StateRule, shape_of

Edits = Sequence[Edit]


def grown_state(
    known: Known,
    state: Mapping[Any, Any],
    parameter: Tensor,
    old: Shape,
    edits: Edits,
    axes: Axes | None,
    beside: Callable[[Any, str], Tensor],
    writes: Writes | None = None,
) -> dict[Any, Any]:
    """New values for the keys of a parameter's state that grow.

    parameter: after the growth. old: its shape before. axes: those over which factors are averaged. beside: returns the tensor
    that is kept under a key for another parameter, by key and name of the parameter. writes: if given, new tensors may get
    their values with `writes.make()` only.
    """
    result: dict[Any, Any] = {}
    for key, value in state.items():
        rule = known.rule(key, state)
        if rule is not None and rule.kind not in ("scalar", "fresh", "factor"):
            result[key] = _grown(rule, key, value, parameter, old, edits, beside, writes)
    for row, column in known.factors:
        if axes is not None and isinstance(state.get(row), Tensor) and isinstance(state.get(column), Tensor):
            pair = grown_factors(state[row].detach(), state[column].detach(), parameter.ndim, axes, edits)
            result[row], result[column] = pair
    return result


def _grown(
    rule: StateRule,
    key: Any,
    value: Any,
    parameter: Tensor,
    old: Shape,
    edits: Edits,
    beside: Callable[[Any, str], Tensor],
    writes: Writes | None,
) -> Any:
    if rule.kind == "matrices":
        return grown_matrices(rule, key, value, edits)
    if rule.kind == "row":
        return mapped(value, lambda tensor: grown_moment(tensor, _along_first(edits, tensor.ndim), rule.power, rule.start))
    if rule.kind == "weights":
        return mapped(value, lambda tensor: _grown_weights(key, tensor, parameter, old, edits, beside))

    def grow(whole: Tensor) -> Tensor:
        return grown_moment(whole, edits, rule.power, rule.start, writes)

    return mapped(value, lambda tensor: shaped(tensor, old, grow))


def mapped(value: Any, grow: Callable[[Tensor], Tensor]) -> Any:
    """Apply `grow` to a tensor, or to every tensor of a container."""
    if isinstance(value, Tensor):
        return grow(value.detach())
    if isinstance(value, Mapping):
        return type(value)({key: mapped(item, grow) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, deque):
        return deque((mapped(item, grow) for item in value), maxlen=value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, grow) for item in value)
    return value


def shaped(tensor: Tensor, shape: Shape, grow: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `grow` to a tensor in the parameter's shape; the result is flat if the tensor was."""
    if tuple(tensor.shape) == shape:
        return grow(tensor)
    return grow(tensor.view(shape)).flatten()


def grown_matrices(rule: StateRule, key: Any, value: Any, edits: Edits) -> Any:
    """Grow one matrix, whose axis is the number in its key, or a list with one matrix per axis."""
    if isinstance(value, Tensor):
        return grown_matrix(value.detach(), axis_of(key), edits, rule.start)
    return type(value)(
        grown_matrix(item.detach(), axis, edits, rule.start) if isinstance(item, Tensor) else item
        for axis, item in enumerate(value)
    )


def axis_of(key: str) -> int:
    """The number that a key ends in."""
    return int(key.rpartition("_")[2])


def _along_first(edits: Edits, ndim: int) -> Edits:
    return [edit for edit in edits if isinstance(edit, Insertion) and edit.axis == 0]


def _grown_weights(
    key: Any, value: Tensor, parameter: Tensor, old: Shape, edits: Edits, beside: Callable[[Any, str], Tensor]
) -> Tensor:
    """Grow kept weights (an average, a starting point) like the network itself, by the same plan.

    Drawn entries are taken from the grown parameter, so that both agree there. A single zero stands for a tensor of zeros
    (Prodigy).
    """
    if value.ndim == 0 and len(old) > 0:
        return _grown_weights(key, value.expand(old).clone(), parameter, old, edits, beside).flatten()

    def grow(whole: Tensor) -> Tensor:
        new = grown(whole, edits)
        names = {edit.weights for edit in edits if isinstance(edit, Insertion) and edit.weights}
        fill_values(new, whole, edits, {name: beside(key, name) for name in names}, 0, {})
        drawn = grown(torch.zeros_like(whole), edits)
        fill_values(drawn, whole, [_marking(edit) for edit in edits if isinstance(edit, Insertion)], {}, 0, {})
        return torch.where(drawn > 0, parameter.detach().to(new), new)

    return shaped(value, old, grow)


def _marking(edit: Insertion) -> Insertion:
    """An insertion that marks drawn entries with one; other new entries copy the mark of their source."""
    fill = "one" if edit.fill == "free" or edit.noise else "copy"
    return replace(edit, fill=fill, signs=(1.0,) * len(edit.at), keep=(), noise=0.0)


def obstacle(known: Known, key: Any, value: Any, shape: Shape, edits: Edits, axes: Axes | None) -> str:
    """Why the state under a key can't grow; empty if it can, or does not have to."""
    rule = known.rule(key)
    if rule is None:
        return f"has no rule in outgrow: {_described(value)}"
    if rule.kind == "fresh":
        return ""
    if rule.kind == "scalar":
        return f"is not a scalar: {_described(value)}" if has_tensors(value) else ""
    if rule.kind in PLAIN and not keeps_old_entries(edits):
        return f"({rule.word}) can't follow units that are copies or rescaled: their past gradients do not follow from it"
    if rule.kind == "matrices":
        return _wrong_matrices(key, value, shape)
    for tensor in state_tensors_in(value):
        expected = shape_of(rule, tensor, shape, axes)
        if rule.kind == "weights" and tensor.ndim == 0 and not bool(tensor):
            continue
        if expected is None or tuple(tensor.shape) != expected:
            return (
                f"has shape {tuple(tensor.shape)} instead of {expected}: it does not belong to this parameter in its shape "
                "before the growth"
            )
        if tensor.layout != torch.strided:
            return "is sparse"
    return ""


def keeps_old_entries(edits: Edits) -> bool:
    """Whether existing entries keep their values and gradients, and no new entry is a copy of an existing one."""
    return all(isinstance(edit, Insertion) and not (edit.gradient or edit.gradient_keep or edit.keep) for edit in edits)


def _wrong_matrices(key: Any, value: Any, shape: Shape) -> str:
    items = [(axis_of(key), value)] if isinstance(value, Tensor) else list(enumerate(value))
    for axis, item in items:
        if not isinstance(item, Tensor):
            continue
        if axis >= len(shape) or tuple(item.shape) not in ((shape[axis],) * 2, (shape[axis],)):
            return f"has a matrix of shape {tuple(item.shape)} for axis {axis} of a parameter of shape {tuple(shape)}"
    return ""


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    inside = ", with tensors inside" if has_tensors(value) else ""
    return f"of type {type(value).__name__}{inside}"


def state_tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set, deque)) else ()
    return [tensor for item in items for tensor in state_tensors_in(item)]


def has_tensors(value: Any, depth: int = 4) -> bool:
    """Whether nested containers, or the attributes of an object, hold a tensor with more than one value."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if depth == 0 or isinstance(value, type):
        return False
    inside = value if isinstance(value, (Mapping, list, tuple, set, deque)) else getattr(value, "__dict__", {})
    items = inside.values() if isinstance(inside, Mapping) else inside
    return any(has_tensors(item, depth - 1) for item in items)
