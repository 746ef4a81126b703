"""How much a new block would lower the loss, for each place, per added FLOP.

A copy of one of the model's own blocks is put behind each place. Its last weights, those that write to the skip, are zero (the
scale of a norm, where a branch ends in one), so that the block adds nothing and the loss stays the same: x + W f(x) with W = 0.
One step of gradient descent with rate η on what is zero lowers the loss by η·gain to first order,

    gain = Σ ‖∂L/∂W‖²,   ∂L/∂W = Σ_t δ_t f(x_t)ᵀ

over the branches of the block, with x the values at that place and δ the gradient there. All places are scored in one copy of
the model: blocks that add nothing leave the gradients of the others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.apply.insert_modules import CONTAINERS
from outgrow.engine.grow import grow
from outgrow.engine.preview import plan
from outgrow.errors import GrowthError
from outgrow.growth_plan.module_starts import Fill, Repeats, Start
from outgrow.model.connections import Loss
from outgrow.model.example import Example
from outgrow.requests import Deepen
from outgrow.scoring.ranking import PlaceScore
from outgrow.scoring.silent_units import SAME, GrownCopy
from outgrow.trace.flops import count_flops
from outgrow.trace.operators import Trace
from outgrow.transforms.deepen.own_kind import containers
from outgrow.transforms.deepen.places import Place, places
from outgrow.transforms.deepen.runs_as_before import within
from outgrow.trials.copies import copies_of


def score_places(
    model: nn.Module, example: Example, batches: Iterable[Any], loss: Loss
) -> tuple[list[PlaceScore], dict[str, str]]:
    """Scores of all places where a block of the model's own kind can be added, and reasons against the other blocks."""
    blocks = {f"{path}.{key}" if path else key for path, module in containers(model) for key in module._modules}
    found = [place for place in places(model, example) if place.name in blocks]
    refused = {place.name: _reason(model, example, place.name) for place in found if not place.own and _is_block(model, place)}
    names = sorted((place.name for place in found if place.own), key=lambda name: name.count("."))  # a stage before its blocks
    if not names:
        return [], refused
    pairs = plan(model, example, *(Deepen(name) for name in names))
    twin = copies_of(model, [])[0]
    copy = GrownCopy(twin, batches, loss)
    before = copy.value()
    made = grow(twin, example, *(Deepen(name, method="copy") for name in names), check=False).plan
    zeroed = [_zero(twin, path, insert.start) for path, insert in zip(made.new_blocks, pairs.inserts, strict=True)]
    after = copy.value()
    if not math.isclose(after, before, rel_tol=SAME, abs_tol=SAME * 1e-2):
        return [], refused | dict.fromkeys(
            names, f"a copy with zeroed weights changes the loss, from {before:.6g} to {after:.6g}"
        )
    gradients = copy.gradients({f"{path}.{name}" for path, own in zip(made.new_blocks, zeroed, strict=True) for name in own})
    trace = dissect(twin, example).reading.trace
    return [
        PlaceScore(
            name,
            sum(float(gradients[f"{path}.{own}"].double().square().sum()) for own in tensors),
            _flops_in(trace, path),
            tuple(tensors),
        )
        for name, path, tensors in zip(names, made.new_blocks, zeroed, strict=True)
    ], refused


def _is_block(model: nn.Module, place: Place) -> bool:
    module = model.get_submodule(place.name)
    return bool(module._modules) and not isinstance(module, CONTAINERS)


def _reason(model: nn.Module, example: Example, name: str) -> str:
    """Why no copy of a block can be put behind it. "r2r-paper" puts in nothing else."""
    try:
        plan(model, example, Deepen(name, method="r2r-paper"))
    except GrowthError as error:
        return error.problems[0].reason if error.problems else str(error)
    return "copies of it are not the identity"


def _zero(model: nn.Module, path: str, start: Start) -> list[str]:
    """Zero the tensors of a new block that pairs would cancel in, or that would be constant; their names in the block."""
    block = model.get_submodule(path)
    values = {write.tensor: 0.0 for write in start.writes if isinstance(write, Repeats) and write.sign < 0}
    values |= {write.tensor: write.value for write in start.writes if isinstance(write, Fill)}
    with torch.no_grad():
        for name, value in values.items():
            block.get_parameter(name).fill_(value)
    return sorted(values)


def _flops_in(trace: Trace, path: str) -> int:
    """The FLOPs of the operators of one module."""
    end = trace.ends[0] if trace.ends else None
    inner = replace(trace, ops=[op for op in trace.ops[:end] if within(op, path)], ends=[])
    return count_flops(inner, [value.shape for value in trace.values].__getitem__)
