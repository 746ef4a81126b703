"""Do new units become different in training, or do they need noise?

Two units with equal rows and equal columns (copies with equal shares) get equal gradients, and stay equal forever. With equal
rows and opposite columns (pairs), they get opposite gradients and differ after the first step. To find out, a grown copy takes
a few steps of gradient descent on a random linear function of its outputs, in eval mode, since dropout would separate them too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.roles import READS
from outgrow.analysis.slot_positions import irregular, slot_ids, unit_runs
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.model.example import Example, call, outputs_in
from outgrow.model.sandbox import untouched
from outgrow.verify.outputs import HALF, wider

PART, EQUAL, DEAD, UNKNOWN = "part", "stay equal", "get no gradient", "can't be determined"
STEPS = 4  # zeros block the gradient of earlier weights for a step or two
STEP = 0.01  # relative to the largest weight
SAME = 1e-3  # gradients that differ by less, relative to the largest, are equal up to rounding
Watched = tuple[Volume, Sequence[int]]  # a volume, and its new units


def parting_in(model: nn.Module, example: Example, name: str, old: int) -> str:
    """Whether the units of a volume from number `old` on become different from units that they equal at first."""
    anatomy = dissect(model, example)
    watched = [(volume, range(old, volume.count)) for volume in anatomy.volumes if volume.name == name]
    return _outcome(model, example, anatomy, watched, ())


def parting_within(model: nn.Module, example: Example, block: str) -> str:
    """Whether units that only modules of a new block write become different from units that they equal at first."""
    anatomy = dissect(model, example)
    inside = [v for v in anatomy.volumes if v.writers and all(f"{path}.".startswith(f"{block}.") for path in v.writers)]
    watched = [(volume, range(volume.count)) for volume in inside if irregular(anatomy, volume) is None]
    return _outcome(model, example, anatomy, watched, [n for n, _ in model.named_parameters() if n.startswith(f"{block}.")])


def _outcome(model: nn.Module, example: Example, anatomy: Anatomy, watched: Sequence[Watched], names: Sequence[str]) -> str:
    """The outcome for the new units in `watched`; names: parameters that are new as a whole."""
    parameters = dict(model.named_parameters())
    groups = [(volume, group) for volume, new in watched for group in _groups(_rows(anatomy, volume, parameters), new)]
    wanted = {slot.tensor for volume, _ in watched for slot in volume.slots} | set(names)
    try:
        gradients = [{name: given[name] for name in wanted & given.keys()} for given in _descend(model, example)]
    except Exception:  # no backward pass: an output without a gradient, a kernel without a backward
        return UNKNOWN
    reached = any(bool(_rows(anatomy, v, g, reads=True)[list(new)].any()) for v, new in watched for g in gradients)
    if not reached and not any(bool(g[name].any()) for g in gradients for name in names):
        return DEAD
    verdicts = [] if groups else [False]
    for volume, group in groups:
        rows = torch.stack([_rows(anatomy, volume, gradient)[group] for gradient in gradients])  # (step, unit, entry)
        largest = float(rows.abs().max())
        if largest:
            verdicts.append(float((rows - rows[:, :1]).abs().max()) <= SAME * largest)
    return UNKNOWN if not verdicts else EQUAL if any(verdicts) else PART


def _rows(anatomy: Anatomy, volume: Volume, tensors: Mapping[str, Tensor], reads: bool = False) -> Tensor:
    """Each unit's entries in the tensors that write and scale it (with `reads`, that read it too): (unit, entry)."""
    slots = {
        (slot.tensor, slot.axis): slot for slot in volume.slots if slot.tensor in tensors and (reads or slot.role != READS)
    }
    parts = []
    for slot in slots.values():
        tensor = tensors[slot.tensor].detach().movedim(slot.axis, 0).cpu()
        for table in unit_runs(slot_ids(anatomy, volume, slot), volume.count):  # (run, unit, offset)
            positions = torch.from_numpy(table.transpose(1, 0, 2).reshape(-1).copy())
            parts.append(tensor[positions].reshape(volume.count, -1))
    return torch.cat(parts, 1) if parts else torch.zeros(volume.count, 0)


def _groups(rows: Tensor, new: Sequence[int]) -> list[list[int]]:
    """Groups of units with equal rows, at least one of them new."""
    found: dict[bytes, list[int]] = defaultdict(list)
    if rows.shape[1]:
        for unit, row in enumerate(rows.contiguous().view(torch.uint8)):
            found[row.numpy().tobytes()].append(unit)
    return [group for group in found.values() if len(group) > 1 and not set(group).isdisjoint(new)]


def _descend(model: nn.Module, example: Example) -> Iterator[dict[str, Tensor]]:
    """The gradients of a few steps of gradient descent, which change the model."""
    if any(parameter.dtype in HALF for parameter in model.parameters()):  # steps would be lost in rounding
        model.float()
        example = wider(example)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    generator = torch.Generator().manual_seed(0)
    weights: list[Tensor] = []
    for _ in range(STEPS):
        with torch.enable_grad(), untouched(model):
            for parameter in parameters.values():
                parameter.requires_grad_(True)
            model.eval()
            outputs = [tensor for tensor in outputs_in(call(model, example)) if tensor.is_floating_point()]
            weights = weights or [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in outputs]
            loss = torch.stack([(w * y)[torch.isfinite(y)].sum() for w, y in zip(weights, outputs, strict=True)]).sum()
            given = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), given, strict=True)
        }
        yield gradients
        steepest = max(float(gradient.abs().max()) for gradient in gradients.values())
        largest = max(float(parameter.detach().abs().max()) for parameter in parameters.values())
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(gradients[name], alpha=STEP * largest / max(steepest, 1e-30))
