"""The value of each tensor of a grown model as an expression over the tensors of the old one.

A growth is a list of steps. Each inserts copies of blocks and then edits tensors, as `engine/carry_out.py` does on a model in
memory. Here only the names of tensors go through the steps. What remains is one short expression per new tensor: stored values,
copied with some entries rewritten, grown by the edits of each plan. An expression needs one stored tensor, and for a weighted
mean a vector of weights; so new tensors can be computed one at a time, in any order. Draws do not depend on the order either:
the seed of a generator is derived from the name of its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outgrow.apply.fills import Init
from outgrow.apply.final_positions import TensorEdits, edits_by_tensor
from outgrow.apply.grow_tensor import fill_values, grown
from outgrow.errors import CheckpointError, Problem
from outgrow.exactness.zero_output import write_into
from outgrow.growth_plan.module_starts import Write
from outgrow.growth_plan.plan import Insert, Insertion, Plan
from outgrow.model.module_paths import joined_path
from outgrow.transforms.site_and_step import Step

IN_MEMORY = "grow the model in memory with outgrow.grow, and train it there"


@dataclass(frozen=True, eq=False)
class Stored:
    """The values of a tensor of the old model, by its name there."""

    name: str


@dataclass(frozen=True, eq=False)
class Copied:
    """A copy that belongs to a new block, with some entries rewritten."""

    source: Value
    writes: tuple[Write, ...]


@dataclass(frozen=True, eq=False)
class Edited:
    """The result of a plan's edits. others: values that weight a mean, by name."""

    source: Value
    edits: TensorEdits
    seed: int
    inits: Mapping[str, Init]
    others: Mapping[str, Value]


Value = Stored | Copied | Edited
Read = Callable[[str], Tensor]
Allocate = Callable[[int, tuple[int, ...], torch.dtype], Tensor]  # memory for the result of the n-th plan


def values_after(names: Iterable[str], steps: Sequence[Step]) -> dict[str, Value]:
    """The tensors after some steps, by their new names. names: those of the tensors before.

    Raises CheckpointError for what a plain checkpoint can't hold: fades, and modules of a new kind.
    """
    values: dict[str, Value] = {name: Stored(name) for name in names}
    for step in steps:
        for plan in step.plans:
            _check(plan)
            for insert in plan.inserts:
                values = _with_block(values, insert)
        for plan in step.plans:
            before = dict(values)
            for name, edits in edits_by_tensor(plan).items():
                weights = {edit.weights for edit in edits if isinstance(edit, Insertion) and edit.weights}
                others = {other: before[other] for other in weights}
                fresh = TensorEdits(edits)  # without the positions that the dry run has cached
                values[name] = Edited(before[name], fresh, plan.seed, step.inits, others)
    return values


def _check(plan: Plan) -> None:
    problems = [Problem(str(graft), "it adds a module that the model's class does not have") for graft in plan.grafts]
    for insert in plan.inserts:
        if insert.made or insert.wraps or insert.prefix is None:
            reason = "the new layer is of another kind than the blocks around it, which the configuration can't describe"
            problems.append(Problem(insert.path, reason, "deepen a stack of equal blocks"))
        elif insert.start.gates or insert.start.whole:
            reason = "the new block fades in by a gate that is no part of a plain model"
            problems.append(Problem(insert.path, reason, f"leave the fade out, or {IN_MEMORY}"))
        elif insert.start.draw is not None:
            problems.append(Problem(insert.path, "its values are drawn by the model's own code", "choose method r2r"))
    for edit in plan.edits:
        if isinstance(edit, Insertion) and edit.fade:
            reason = "its new entries fade in over optimizer steps, which are not part of a plain model"
            problems.append(Problem(edit.tensor, reason, f"leave the fade out, or {IN_MEMORY}"))
    if problems:
        raise CheckpointError("a checkpoint on the disk can't be grown in this way", problems[:5])


def _with_block(values: Mapping[str, Value], insert: Insert) -> dict[str, Value]:
    """The tensors after an insert: those of later blocks are renamed, and those of the new block are copies."""
    source = joined_path(insert.container, f"{insert.prefix}{insert.first + insert.copy_of}") + "."
    found = {insert.renamed(name): value for name, value in values.items()}
    for name, value in values.items():
        if name.startswith(source):
            inner = name.removeprefix(source)
            writes = tuple(write for write in insert.start.writes if write.tensor == inner)
            found[f"{insert.path}.{inner}"] = Copied(value, writes)
    return found


def origin(value: Value) -> str:
    """The name of the stored tensor that a value is derived from."""
    while not isinstance(value, Stored):
        value = value.source
    return value.name


def is_unchanged(value: Value) -> bool:
    """Whether a value is a plain copy of the stored bytes."""
    return isinstance(value, Stored) or (isinstance(value, Copied) and not value.writes and is_unchanged(value.source))


def is_moved_and_drawn(value: Value) -> bool:
    """Whether a value consists of stored entries, copies of them up to the sign, constants, and draws.

    Such a value is computed in the dtype of the file: only draws are rounded.
    """
    if not isinstance(value, Edited) or not is_unchanged(value.source) or value.others:
        return False
    return all(isinstance(edit, Insertion) and _is_moved_or_drawn(edit, value.inits) for edit in value.edits)


def _is_moved_or_drawn(edit: Insertion, inits: Mapping[str, Init]) -> bool:
    if edit.keep or edit.noise or edit.fill not in ("free", "zero", "one", "copy") or callable(inits.get(edit.init)):
        return False
    return edit.fill != "copy" or all(abs(sign) == 1.0 for sign in edit.signs)


def plans_in(value: Value) -> int:
    """The number of plans whose edits a value has been through."""
    return 0 if isinstance(value, Stored) else plans_in(value.source) + isinstance(value, Edited)


def needs_others(value: Value) -> bool:
    """Whether a value depends on more than one stored tensor."""
    return not isinstance(value, Stored) and (needs_others(value.source) or (isinstance(value, Edited) and bool(value.others)))


@torch.no_grad()
def compute(value: Value, read: Read, allocate: Allocate | None = None) -> Tensor:
    """The values of a tensor.

    read: returns the values of a stored tensor, in memory that may be changed. allocate: returns memory for results.
    """
    match value:
        case Stored():
            return read(value.name)
        case Copied():
            tensor = compute(value.source, read, allocate)
            for write in value.writes:
                write_into(tensor, write)
            return tensor
        case Edited():
            old = compute(value.source, read, allocate)
            others = {name: compute(other, read) for name, other in value.others.items()}
            shape = value.edits.shape_from(tuple(old.shape))
            new = grown(old, value.edits, new=None if allocate is None else allocate(plans_in(value), shape, old.dtype))
            fill_values(new, old, value.edits, others, value.seed, value.inits)
            return new
