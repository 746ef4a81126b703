"""The tensors of a model that a checkpoint holds: its state dict, and buffers outside it that a growth has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isfinite

import torch
from torch import Tensor, nn

from outgrow.errors import CheckpointError, Problem
from outgrow.history.growth_order import Histories, order_growths_of, present_name
from outgrow.model.module_paths import inside
from outgrow.saving.extra_state import is_extra
from outgrow.saving.replay_growths import BUFFER


def contents_of(model: nn.Module, histories: Histories) -> dict[str, Tensor]:
    """The tensors of the state dict, and buffers outside it that a plan has changed. (For extra state see `extra_state.py`.)"""
    contents: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            if is_extra(name):
                continue
            raise CheckpointError(
                f"{name} of the state dict is a {type(value).__name__} and not a tensor: it can't be stored safely"
            )
        if value.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device and has no values: allocate it with model.to_empty(device='cpu')"
            )
        contents[name] = value
    known = {id(tensor) for tensor in contents.values()}
    outside = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
    return {**contents, **{BUFFER + name: outside[name] for name in _changed(model, outside, histories)}}


def _changed(model: nn.Module, buffers: Mapping[str, Tensor], histories: Histories) -> list[str]:
    """Names of buffers that a plan has changed, and of buffers in new blocks, since pairs of blocks may have changed gains."""
    steps = order_growths_of(model, histories)
    if steps is None:
        raise CheckpointError("the growth history does not fit the model: was the model changed by hand since its last growth?")
    plans = [(plan, n, done) for n, step in enumerate(steps) for done, plan in enumerate(step.plans, 1)] if buffers else []
    edited = {present_name(edit.tensor, steps, n, done) for plan, n, done in plans for edit in plan.edits}
    new = [present_name(path, steps, n, done) for plan, n, done in plans for path in plan.new_blocks]
    copies = {name for path in new for name in buffers if inside(path, name) is not None}
    return [name for name, value in buffers.items() if name in edited or (name in copies and value.is_floating_point())]


def unique(contents: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, ready to be written, and the other names of tied tensors."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in contents.items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if first.setdefault(where, name) != name:
            aliases[name] = first[where]
    kept = {name: tensor.detach() for name, tensor in contents.items() if name not in aliases}
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in kept.values())
    for name, tensor in kept.items():  # views of one storage are written as separate tensors
        shared = users[tensor.untyped_storage().data_ptr()] > 1 and tensor.numel() > 0
        kept[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    return kept, aliases


def not_finite(model: nn.Module, contents: Mapping[str, Tensor]) -> list[Problem]:
    """Tensors that hold NaN or infinity. (Minus infinity is allowed in buffers: attention masks contain it.)"""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    problems = []
    for name, tensor in contents.items():
        values = tensor.detach()
        if not (values.is_floating_point() or values.is_complex()) or _has_finite_sum(values):
            continue
        values = values.float() if values.element_size() == 1 else values
        masks = name.removeprefix(BUFFER) in buffers and not values.is_complex()
        fine = values.isfinite() | values.isneginf() if masks else values.isfinite()
        if not bool(fine.all()):
            bad = values[~fine]
            problems.append(Problem(name, f"{bad.numel()} of {values.numel()} values, the first is {bad[0].item()}"))
    return problems


def _has_finite_sum(values: Tensor) -> bool:
    """Whether the sum of all values is finite: then each value is. This is much faster than checking each value."""
    if values.element_size() == 1 or values.is_complex():
        return False
    return isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).item())
