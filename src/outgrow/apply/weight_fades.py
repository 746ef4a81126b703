"""Weights that fade in over some optimizer steps: in a faded widening, the columns that read the new units.

    after each step:   w → w + (λ′ − λ)·A,   λ from 0 to 1

The optimizer's updates in the meantime are added to that. A drift is not part of the network: at any moment the parameter
itself holds the values that the network computes with. A drift advances after each step of an optimizer that holds its
parameter, and is removed when λ is 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply.fills import Init
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.apply.grow_tensor import fill_values, grown
from outgrow.growth_plan.plan import Edit, Insertion, Plan, Rescaling
from outgrow.model.dtensor import is_dtensor, placed
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.model.sandbox import tensors_of
from outgrow.modules.gates import CLOCK

ATTRIBUTE = "_outgrow_drifts"  # of the module that has the parameter
STORED = "outgrow.fade/"  # prefix of the amounts' names in a checkpoint


class Drift:
    """Positions along an axis of a parameter, the amount A that is added there in all, and the number of steps."""

    def __init__(self, module: nn.Module, name: str, axis: int, at: Tensor, amount: Tensor, steps: int, done: int = 0) -> None:
        self.module, self.name, self.axis = module, name, axis
        self.at, self.amount = at, amount
        self.steps, self.done = steps, done
        CLOCK.watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        CLOCK.watch(self)

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = getattr(self.module, self.name)
        return tensor

    def moves_with(self, held: AbstractSet[int]) -> bool:
        """Whether this drift advances with a step of an optimizer that holds these parameters (by id)."""
        return id(self.tensor) in held

    @torch.no_grad()
    def advance(self) -> None:
        """Advance by one step. In low precision small increments would be lost, so λA is rounded, not its increments."""
        tensor = self.tensor
        self.at, self.amount = self.at.to(tensor.device), self.amount.to(tensor.device)  # once, if the model has moved
        now, then = ((self.amount * (done / self.steps)).to(tensor.dtype) for done in (self.done, self.done + 1))
        if is_dtensor(tensor):
            whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            tensor.add_(placed(whole.index_add_(self.axis, self.at, then - now), tensor))
        else:
            tensor.index_add_(self.axis, self.at, then - now)
        self.done += 1
        if self.done >= self.steps:
            _put(self.module, [drift for drift in drifts_at(self.module) if drift is not self])


def drifts_at(module: nn.Module) -> list[Drift]:
    return list(vars(module).get(ATTRIBUTE, ()))


def drifts_of(model: nn.Module) -> Iterator[tuple[str, Drift]]:
    """All unfinished drifts, each with the name of its tensor."""
    for path, module in model.named_modules():
        for drift in drifts_at(module):
            yield joined_path(path, drift.name), drift


def _put(module: nn.Module, drifts: Sequence[Drift]) -> None:
    vars(module).pop(ATTRIBUTE, None)
    if drifts:
        vars(module)[ATTRIBUTE] = list(drifts)


def set_drifts(module: nn.Module, drifts: Sequence[Drift], journal: Journal) -> None:
    journal.note(partial(_put, module, drifts_at(module)))
    _put(module, drifts)


def without_drifts(block: nn.Module) -> None:
    """Remove all drifts from a copied block, so that its weights stay as they are."""
    for module in block.modules():
        _put(module, [])


@torch.no_grad()
def grow_drifts(
    model: nn.Module,
    plan: Plan,
    olds: Mapping[str, Tensor],
    inits: Mapping[str, Init],
    journal: Journal,
    start: bool = True,
) -> None:
    """Grow unfinished drifts with their tensors, and start the drifts of a plan.

    olds: the tensors before the plan was carried out, by name. start: False for averaged copies, which follow the model.
    """
    under_way = any(ATTRIBUTE in vars(module) for module in model.modules())
    if not under_way and not any(isinstance(edit, Insertion) and edit.fade for edit in plan.edits):
        return
    present = tensors_of(model)
    for name, edits in edits_by_tensor(plan).items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        old = olds[name]
        if old.is_meta:  # a dry run on the meta device: there are no values to fade in
            continue
        kept = [drift for drift in drifts_at(module) if drift.tensor is not present[name]]
        for drift in drifts_at(module):
            if drift.tensor is present[name]:
                whole = torch.zeros_like(old).index_copy_(drift.axis, drift.at.to(old.device), drift.amount.to(old))
                kept += _drift(module, own, drift.axis, _filled(whole, old, edits, 0, plan, inits), drift.steps, drift.done)
        fades = {edit.fade: edit.axis for edit in edits if start and isinstance(edit, Insertion) and edit.fade}
        for steps, axis in fades.items():
            kept += _drift(module, own, axis, _filled(torch.zeros_like(old), old, edits, steps, plan, inits), steps)
        if kept != drifts_at(module):
            set_drifts(module, kept, journal)


def _filled(whole: Tensor, old: Tensor, edits: Sequence[Edit], fade: int, plan: Plan, inits: Mapping[str, Init]) -> Tensor:
    """The amounts to add, after some edits: copied for entries that are copied, drawn for those that this growth fades in."""
    changed: list[Edit] = []
    for edit in edits:
        if isinstance(edit, Rescaling):
            edit = replace(edit, offset=0.0)
        elif isinstance(edit, Insertion):
            drawn = edit.fade > 0 and edit.fade == fade
            edit = replace(edit, fade=0, noise=0.0, fill=edit.fill if drawn or edit.fill == "copy" else "zero")
        changed.append(edit)
    new = grown(whole, changed)
    fill_values(new, old, changed, {}, plan.seed, inits)
    return new


def _drift(module: nn.Module, name: str, axis: int, whole: Tensor, steps: int, done: int = 0) -> list[Drift]:
    """One drift of the positions whose amounts are not zero; an empty list if there are none."""
    at = whole.movedim(axis, 0).reshape(whole.shape[axis], -1).any(1).nonzero().flatten()
    return [Drift(module, name, axis, at, whole.index_select(axis, at), steps, done)] if len(at) else []


def pack_drifts(model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The unfinished drifts for a checkpoint: facts as JSON, amounts as tensors."""
    facts: list[dict[str, Any]] = []
    amounts: dict[str, Tensor] = {}
    for number, (name, drift) in enumerate(drifts_of(model)):
        facts.append({"tensor": name, "axis": drift.axis, "at": drift.at.tolist(), "done": drift.done, "steps": drift.steps})
        amounts[f"{STORED}{number}"] = drift.amount.contiguous()
    return facts, amounts


def restore_drifts(
    model: nn.Module, facts: Sequence[Mapping[str, Any]], amounts: Mapping[str, Tensor], journal: Journal
) -> None:
    """Restore the drifts of a checkpoint; ValueError if they do not fit the model."""
    for module in model.modules():
        if drifts_at(module):
            set_drifts(module, [], journal)
    tensors = tensors_of(model)
    for number, fact in enumerate(facts):
        name, axis, at, amount = fact["tensor"], fact["axis"], torch.tensor(fact["at"]), amounts[f"{STORED}{number}"]
        shape = list(tensors[name].shape)
        sane = 0 <= axis < len(shape) and at.ndim == 1 and 0 < len(at) <= shape[axis] and 0 <= fact["done"] < fact["steps"]
        if not sane or not 0 <= int(at.min()) <= int(at.max()) < shape[axis]:
            raise ValueError(f"the fade of {name} is out of bounds")
        shape[axis] = len(at)
        if list(amount.shape) != shape:
            raise ValueError(f"the fade of {name} has shape {tuple(amount.shape)}, not {tuple(shape)}")
        module, own = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        device = tensors[name].device
        drift = Drift(module, own, axis, at.to(device), amount.to(device), fact["steps"], fact["done"])
        set_drifts(module, [*drifts_at(module), drift], journal)
