"""Measure a growth on a copy of the model: which existing values changed, and how many new ones are free."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from outgrow.analysis.roles import READS
from outgrow.analysis.slot_positions import slot_ids, unit_runs
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.final_positions import edits_by_tensor
from outgrow.engine.grow import grow
from outgrow.engine.growth_report import Growth
from outgrow.errors import GrowthError
from outgrow.exactness.zero_output import Zeroing
from outgrow.growth_plan.plan import Insertion, Plan, Rotation
from outgrow.model.example import Example
from outgrow.model.sandbox import tensors_of
from outgrow.requests import Deepen, Widen


def grown_copy(model: nn.Module, example: Example, transform: Widen | Deepen) -> Growth:
    """Grow a copy of a model; the model itself stays unchanged."""
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise GrowthError(f"the model can't be copied: {type(error).__name__}: {error}") from error
    return grow(twin, example, transform)


def changed(model: nn.Module, growth: Growth) -> tuple[str, ...]:
    """Names of existing tensors whose values changed in any bit, and of float attributes that changed (ε)."""
    after, edits = tensors_of(growth.model), edits_by_tensor(growth.plan)
    names = []
    for name, old in tensors_of(model).items():
        now = growth.plan.renamed(name)
        part = after[now].detach()
        for edit in reversed(edits.get(now, [])):
            if isinstance(edit, Insertion):
                new = set(edit.at)
                kept = [position for position in range(edit.new_size) if position not in new]
                part = part.index_select(edit.axis, torch.tensor(kept, device=part.device))
        if not _same_bits(part, old.detach()):
            names.append(name)
    settings = [s for s in growth.plan.settings if isinstance(s.new, float) and s.item is None]
    return (*names, *(f"{setting.module}.{setting.name}".removeprefix(".") for setting in settings))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


def drawn(growth: Growth) -> tuple[int, int]:
    """How many of a widening's new parameters are drawn independently, and how many there are.

    Where two insertions into a tensor cross, the later one fills the entries that belong to both.
    """
    parameters = dict(growth.model.named_parameters())
    free = 0
    for name, edits in edits_by_tensor(growth.plan).items():
        if name not in parameters:
            continue
        shape = list(parameters[name].shape)
        for edit in (edit for edit in reversed(edits) if isinstance(edit, Insertion)):
            if edit.draws:
                beside = math.prod(size for axis, size in enumerate(shape) if axis != edit.axis)
                free += len(set(edit.draws)) * beside
                free -= shape[0] if edit.fill == "spread" else 0  # the mean square of each row is fixed
            shape[edit.axis] = edit.size
    return free, growth.parameters[1] - growth.parameters[0]


def free_parameters(block: nn.Module, anatomy: Anatomy, zeroing: Zeroing) -> tuple[int, int]:
    """How many parameters of an identity block are neither zero nor determined by others, and how many it has."""
    parameters = dict(block.named_parameters())
    bound = {name: torch.zeros(parameter.shape, dtype=torch.bool) for name, parameter in parameters.items()}
    for name in {name for name, _ in zeroing.fills} & set(bound):
        bound[name][...] = True
    columns = list(zeroing.columns)
    for pairing in zeroing.pairings:
        for slot in pairing.volume.slots:
            if slot.role == READS and (slot.tensor, slot.axis) != pairing.reader:
                continue
            tables = unit_runs(slot_ids(anatomy, pairing.volume, slot), pairing.volume.count)  # (run, unit, offset)
            odd = [table[:, 1::2] for table in tables]
            if (slot.tensor, slot.axis) == pairing.reader:
                odd += [table[:, pairing.volume.count - pairing.volume.count % 2 :] for table in tables]
            columns += [(slot.tensor, slot.axis, tuple(part.reshape(-1).tolist())) for part in odd]
    for name, axis, positions in columns:
        if name in bound:
            bound[name].index_fill_(axis, torch.tensor(positions, dtype=torch.int64), True)
    total = sum(mask.numel() for mask in bound.values())
    return total - sum(int(mask.sum()) for mask in bound.values()), total


def rotations(plan: Plan) -> int:
    """The number of free parameters of the orthogonal matrices of a plan."""
    sides = {edit.draw: edit.side for edit in plan.edits if isinstance(edit, Rotation)}
    return sum(side * (side - 1) // 2 for side in sides.values())
