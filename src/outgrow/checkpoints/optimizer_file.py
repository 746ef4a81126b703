"""Read optimizer.pt, a file of `torch.save(optimizer.state_dict())`, without its values: settings, and where each tensor lies.

The file is a zip archive: a pickle that describes a tree of values, and one record of bytes per tensor. The pickle is read with
`weights_only=True`, which builds plain values and tensors only and runs no code of the file.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outgrow.checkpoints.read_checkpoint import StoredTensor
from outgrow.errors import CheckpointError

LISTS = ("params", "param_names")
PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True, eq=False)
class OptimizerFile:
    """The contents of an optimizer's file. state: by number of the parameter and key; tensors are not read yet."""

    path: str
    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]

    @property
    def counts(self) -> list[int]:
        """The number of parameters of each group."""
        return [len(group["params"]) for group in self.groups]


def load_plain(path: str) -> Any:
    """The contents of a torch file; tensors have shapes, and no values. CheckpointError if it can't be read safely."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} can't be read: it is truncated, or not a file of torch.save: copy it again")
    try:
        with FakeTensorMode():
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} can't be read safely: {_unsafe(path, error)}") from error
    except Exception as error:  # torch raises many kinds for damaged files
        raise CheckpointError(f"{path} can't be read: {str(error).partition(chr(10))[0]}") from error


def _unsafe(path: str, error: Exception) -> str:
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:
        names = []
    if names:
        return f"it holds objects of {', '.join(names[:3])}, whose code would run; only plain values and tensors are read"
    return str(error).partition("\n")[0]


def read_optimizer_file(path: str) -> OptimizerFile:
    """The settings and the places of all tensors of an optimizer's state."""
    data = load_plain(path)
    groups, state = (data.get(key) if isinstance(data, dict) else None for key in ("param_groups", "state"))
    if not isinstance(groups, list) or not isinstance(state, dict) or not all(_is_group(group) for group in groups):
        raise CheckpointError(f"{path} does not contain the state dict of an optimizer: param_groups and state")
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(numbers))) or not set(state) <= set(numbers):
        raise CheckpointError(f"{path}: its parameters are not numbered from 0 on, group by group, as torch numbers them")
    size = os.path.getsize(path)
    found = {
        number: {key: _placed(value, path, size, f"parameter {number} ({key})") for key, value in entry.items()}
        for number, entry in state.items()
    }
    settings = [
        {key: value if key in LISTS else _placed_setting(value, path, size, key) for key, value in group.items()}
        for group in groups
    ]
    return OptimizerFile(path, found, settings)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)


def _placed_setting(value: Any, path: str, size: int, key: str) -> Any:
    """A setting of a group: plain values, and learning rates that are tensors."""
    items = value if isinstance(value, (tuple, list)) else (value,)
    placed = [_placed(item, path, size, f"the groups ({key})") for item in items]
    return type(value)(placed) if isinstance(value, (tuple, list)) else placed[0]


def _placed(value: Any, path: str, size: int, where: str) -> Any:
    """The place of a tensor in the file; other values as they are."""
    if not isinstance(value, Tensor):
        if isinstance(value, PLAIN):
            return value
        raise CheckpointError(f"{path}: the state of {where} is a {type(value).__name__}, which has no rule")
    storage = value.untyped_storage()
    offset = getattr(storage, "_checkpoint_offset", None)
    if offset is None:
        raise CheckpointError(f"{path}: this version of torch does not say where tensors lie in a file: use torch 2.7 or later")
    if value.layout != torch.strided or not value.is_contiguous():
        raise CheckpointError(f"{path}: the state of {where} is not a contiguous tensor, which can't be grown on disk")
    start, length = offset + value.storage_offset() * value.dtype.itemsize, value.numel() * value.dtype.itemsize
    if start + length > size:
        raise CheckpointError(f"{path} is truncated: the state of {where} ends behind the file: copy it again")
    return StoredTensor(path, value.dtype, tuple(value.shape), start, length)
