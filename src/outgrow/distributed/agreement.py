"""Decisions that must be the same on all ranks: rank 0 decides, and broadcasts the result.

Rules depend on metrics, which may differ between ranks, or exist on one rank only. If one rank grew and another did not, both
would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outgrow.distributed.ddp import wrappers_around
from outgrow.distributed.fsdp import group_of
from outgrow.errors import ParallelError, Problem

T = TypeVar("T")


def team(given: Any, model: nn.Module) -> Any:
    """The process group that trains a model; None if this process trains it alone. given: the model or a wrapper around it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group_of(model)
    if group is None:
        wrappers = [given] if isinstance(given, DistributedDataParallel) else wrappers_around([model])
        group = next((wrapper.process_group for wrapper in wrappers), None)
    return None if group is None or dist.get_world_size(group) == 1 else group


def by_first(group: Any, decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 of a group, and return its result on all ranks; if it raises there, all ranks raise."""
    if group is None:
        return decide()
    message: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            message = [(decide(), "")]
        except Exception as error:
            failure, message = error, [(None, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    decided, reason = message[0]
    if failure is not None:
        raise failure
    if reason:
        raise ParallelError("rank 0 decides for all ranks, and raised an error", [Problem("rank 0", reason)])
    result: T = decided
    return result


def of_all(group: Any, mine: T) -> list[T]:
    """The value of every rank of a group, in the order of ranks."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
