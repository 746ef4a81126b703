"""What a checkpoint holds of a model: the tensors of its state dict, and buffers outside it that a growth has changed."""

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
    """The tensors of the state dict, and buffers outside it that some plan has changed. (For the rest see `extra_state.py`.)"""
    contents: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            if is_extra(name):
                continue
            raise CheckpointError(
                f"{name} of the state dict is no tensor but a {type(value).__name__}: it can't be stored safely"
            )
        if value.is_meta:
            raise CheckpointError(f"{name} is on the meta device and holds no numbers: model.to_empty(device='cpu') makes room")
        contents[name] = value
    known = {id(tensor) for tensor in contents.values()}
    outside = {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in known}
    return {**contents, **{BUFFER + name: outside[name] for name in _changed(model, outside, histories)}}


def _changed(model: nn.Module, buffers: Mapping[str, Tensor], histories: Histories) -> list[str]:
    """Those of some buffers that a plan has changed, and those of new blocks, which pairs may have changed (gains)."""
    steps = order_growths_of(model, histories)
    if steps is None:
        raise CheckpointError("the history of growths does not fit the model: was it changed by hand since?")
    plans = [(plan, n, done) for n, step in enumerate(steps) for done, plan in enumerate(step.plans, 1)] if buffers else []
    edited = {present_name(edit.tensor, steps, n, done) for plan, n, done in plans for edit in plan.edits}
    new = [present_name(path, steps, n, done) for plan, n, done in plans for path in plan.new_blocks]
    copies = {name for path in new for name in buffers if inside(path, name) is not None}
    return [name for name, value in buffers.items() if name in edited or (name in copies and value.is_floating_point())]


def unique(contents: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, ready to be written, and the further names of tied ones."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in contents.items():
        where = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        if first.setdefault(where, name) != name:
            aliases[name] = first[where]
    kept = {name: tensor.detach() for name, tensor in contents.items() if name not in aliases}
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in kept.values())
    for name, tensor in kept.items():  # views of one storage are written as tensors of their own
        shared = users[tensor.untyped_storage().data_ptr()] > 1 and tensor.numel() > 0
        kept[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
    return kept, aliases


def not_finite(model: nn.Module, contents: Mapping[str, Tensor]) -> list[Problem]:
    """Tensors with NaN or infinity in them. (Minus infinity is fine in a buffer: attention masks are made of it.)"""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    problems = []
    for name, tensor in contents.items():
        values = tensor.detach()
        if not (values.is_floating_point() or values.is_complex()) or _sums_up(values):
            continue
        values = values.float() if values.element_size() == 1 else values
        masks = name.removeprefix(BUFFER) in buffers and not values.is_complex()
        fine = values.isfinite() | values.isneginf() if masks else values.isfinite()
        if not bool(fine.all()):
            bad = values[~fine]
            problems.append(Problem(name, f"{bad.numel()} of {values.numel()} numbers, the first is {bad[0].item()}"))
    return problems


def _sums_up(values: Tensor) -> bool:
    """Whether the sum of all values is finite: then each of them is. That is far quicker than to check each value."""
    if values.element_size() == 1 or values.is_complex():
        return False
    return isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).item())
