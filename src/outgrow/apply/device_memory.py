"""Reserve the GPU memory of a growth with one call of the driver.

Each new tensor may make the allocator call the driver, which waits for the device. Instead, one block for all of them is
allocated and freed at once, so that the allocator can cut the tensors from its cache.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outgrow.apply.final_positions import edits_by_tensor
from outgrow.growth_plan.plan import Plan

LEAST_BYTES = 2**28  # below this the driver is called a few times only


def reserve(tensors: Mapping[str, Tensor], plan: Plan, optimizers: Sequence[Any]) -> None:
    """Reserve the memory that a plan needs on each GPU beyond the allocator's cache; nothing happens if it does not fit."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return
    states = [getattr(optimizer, "state", {}) for optimizer in optimizers]
    needed: dict[torch.device, int] = defaultdict(int)
    for name, edits in edits_by_tensor(plan).items():
        tensor = tensors[name]
        if tensor.device.type != "cuda":
            continue
        growth = 1.0
        for axis, size in edits.sizes.items():
            growth *= size / tensor.shape[axis]
        alike = [tensor, tensor.grad, *(value for state in states for value in state.get(tensor, {}).values())]
        bytes_now = sum(one.nbytes for one in alike if isinstance(one, Tensor) and one.shape == tensor.shape)
        needed[tensor.device] += int(bytes_now * growth)
    for device, size in needed.items():
        size -= torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size >= LEAST_BYTES:
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(size, dtype=torch.uint8, device=device)
