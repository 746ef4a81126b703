"""Sharded tensors (DTensor): recognise them, and shard a whole tensor in the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def placed(value: Tensor, parameter: Any) -> Any:
    """A tensor that all ranks have, sharded like a parameter, without communication.

    A tensor whose shape differs from the parameter's is returned unchanged.
    """
    if not is_dtensor(parameter) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    part = value[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    local = part.to(parameter.device).clone(memory_format=torch.contiguous_format)
    whole = value.new_empty(value.shape, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def is_dtensor(parameter: object) -> bool:
    return type(parameter).__name__ == "DTensor"
