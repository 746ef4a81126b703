"""What has to be decided alike by all processes that train a model together: rank 0 decides, and tells the others.

A rule looks at metrics, and those may be each rank's own, or there on one rank alone. Were one rank to grow and another not,
both would wait for each other for ever.
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
    """The process group that trains the model in what was given; None if this process does alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group_of(model)
    if group is None:
        wrappers = [given] if isinstance(given, DistributedDataParallel) else wrappers_around([model])
        group = next((wrapper.process_group for wrapper in wrappers), None)
    return None if group is None or dist.get_world_size(group) == 1 else group


def by_first(group: Any, decide: Callable[[], T]) -> T:
    """What `decide` returns on rank 0 of a group, on all of its ranks; where it raises there, all raise."""
    if group is None:
        return decide()
    told: list[Any] = [None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            told = [(decide(), "")]
        except Exception as error:
            failure, told = error, [(None, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(told, src=dist.get_global_rank(group, 0), group=group)
    decided, reason = told[0]
    if failure is not None:
        raise failure
    if reason:
        raise ParallelError("rank 0 decides for all, and could not", [Problem("rank 0", reason)])
    result: T = decided
    return result


def of_all(group: Any, mine: T) -> list[T]:
    """What every rank of a group has, in the order of ranks."""
    if group is None:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone
