"""Growth in several processes: all ranks grow in the same way, and DistributedDataParallel wrappers stay usable.

A wrapper averages gradients with a *reducer*, which holds the parameters, buckets of their sizes, and hooks on them. After a
growth, the old reducer would fail, or would miss new parameters, so that the ranks diverge. `renew` builds a new reducer inside
the same wrapper, so that all references to the wrapper (in a training loop, Lightning's strategy, Accelerate) stay valid. A
growth does this for every existing wrapper around the model, whether the call got the wrapper or the module inside.

Ranks stay equal bit for bit if they grow in the same way. So, if a wrapper spans several ranks:

    before   tensors of the example come from rank 0, and so do buffers, if the wrapper broadcasts them at its next forward pass
    after    plans and checksums of the parameters are compared over all ranks; if a rank differs or has refused the growth, the
             error names it, and no rank has grown

Gradients stay unchanged on each rank: under `no_sync` they differ between ranks, and the next backward pass averages them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from outgrow.distributed.fsdp import gathered
from outgrow.errors import GrowthError, ParallelError, Problem
from outgrow.growth_plan.plan import Plan
from outgrow.model.example import Example

WRAP_AGAIN = "delete the wrapper (del wrapper), grow the module that was in it (wrapper.module), then wrap it again"
SAME_ON_ALL_RANKS = (
    "call the growth on every rank, with the same transforms and the same seed, on equal models. If values depend on batch "
    "statistics that differ between ranks (broadcast_buffers=False), make those equal first"
)


def renew(wrapper: DistributedDataParallel) -> None:
    """Build the reducer of a DistributedDataParallel wrapper again, for the current shapes and parameters of its module.

    Growths do this themselves. Nothing is sent between ranks, and gradients stay unchanged.

    Raises ParallelError, and changes nothing, for wrappers that can't be renewed: with communication hooks that have a state,
    DDP's own mixed precision, delayed all-reduce, optimizers inside the backward pass, or the Python reducer.
    """
    check_renewable([wrapper])
    hooks, builtin = list(wrapper._comm_hooks), _builtin_hook(wrapper)
    wrapper._remove_autograd_hooks()
    del wrapper.reducer, wrapper.logger  # also deletes gradient accumulators of the old shapes
    ignored = wrapper.parameters_to_ignore
    wrapper._module_parameters = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper.static_graph = False
        with _quiet(wrapper):
            wrapper._set_static_graph()
    wrapper._comm_hooks.clear()
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
    if builtin is not None:
        wrapper._register_builtin_comm_hook(builtin)


@contextlib.contextmanager
def _quiet(wrapper: DistributedDataParallel) -> Iterator[None]:
    """Suppress the warning of `_set_static_graph` about two options; the constructor has given it already."""
    unused, wrapper.find_unused_parameters = wrapper.find_unused_parameters, False
    yield
    wrapper.find_unused_parameters = unused


def _builtin_hook(wrapper: DistributedDataParallel) -> Any:
    """The communication hook, if it is one of torch's own in C++, which only the wrapper's logging data show."""
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))
    kinds = getattr(dist, "BuiltinCommHookType").__members__.values()  # noqa: B009
    return next((kind for kind in kinds if str(kind) == name), None)


def check_renewable(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise one error with all reasons why wrappers can't be renewed after a growth."""
    problems = []
    for wrapper in wrappers:
        states = [state for _, state in getattr(wrapper, "_comm_hooks", ())]
        reasons = {
            "mixed_precision=": wrapper.mixed_precision is not None,
            "delay_all_reduce_named_params=": bool(wrapper._delay_all_reduce_params),
            "the Python reducer (torch._dynamo.config.optimize_ddp)": wrapper._use_python_reducer,
            "an optimizer inside the backward pass": any(hasattr(p, "_in_backward_optimizers") for p in wrapper.parameters()),
            "a communication hook with a state (e.g. PowerSGD)": not all(
                state is None or isinstance(state, dist.ProcessGroup) for state in states
            ),
        }
        where = f"DistributedDataParallel around {type(wrapper.module).__name__}"
        problems += [
            Problem(where, f"it has {reason}, which is bound to the old shapes", WRAP_AGAIN)
            for reason, found in reasons.items()
            if found
        ]
    if problems:
        raise ParallelError("a wrapper can't follow the growth", problems)


def wrappers_around(models: Sequence[nn.Module], given: Any = None) -> list[DistributedDataParallel]:
    """All existing DistributedDataParallel wrappers around any of these modules, the given one first."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(given, DistributedDataParallel):
        return [given, *(wrapper for wrapper in _around(models) if wrapper is not given)]
    found = [ref(wrapper) for wrapper in _around(models)]
    if found:
        gc.collect()  # a deleted wrapper may not have been collected yet, possibly on one rank only
    return [wrapper for each in found if (wrapper := each()) is not None]


def _around(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    kinds = {DistributedDataParallel}
    while more := {kind for known in kinds for kind in known.__subclasses__()} - kinds:
        kinds |= more
    # an object refers to its class. gc.get_objects() would also return tuples that other threads are still filling
    wrappers = [one for one in gc.get_referrers(*kinds) if type(one) in kinds and "module" in one._modules]
    known = {id(model) for model in models}
    return [wrapper for wrapper in wrappers if any(id(module) in known for module in wrapper.modules())]


def renew_around(models: Sequence[nn.Module]) -> None:
    for wrapper in wrappers_around(models):
        renew(wrapper)


@dataclass(eq=False)
class Ranks:
    """The processes that take part in a growth; without a group, only this one."""

    model: nn.Module
    example: Example
    lengths: Sequence[int] | None = None  # of the part of the example that the check uses
    group: Any = None
    before: Mapping[str, int] = field(default_factory=dict)
    again: Callable[[], None] = lambda: None
    agreed: bool = False

    def conclude(self, plans: Sequence[Plan]) -> None:
        """Raise, on all ranks, if the growth differs between ranks; otherwise shard again what was sharded."""
        if self.group is not None:
            after = checksums(self.model)
            self._compare({"plans": [plan.to_json() for plan in plans], "before": self.before, "after": after})
        self.again()

    def report_failure(self, error: Exception) -> None:
        """Report to the other ranks that this one has not grown."""
        if self.group is not None and not self.agreed:
            with contextlib.suppress(ParallelError):
                self._compare({"refused": str(error) or type(error).__name__})

    def _compare(self, mine: Mapping[str, Any]) -> None:
        self.agreed = True
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        refused = [Problem(f"rank {rank}", one["refused"]) for rank, one in enumerate(everyone) if "refused" in one]
        if refused:
            raise ParallelError("a rank refused the growth, so no rank has grown", refused)
        problems = [
            Problem(f"rank {rank}", text, SAME_ON_ALL_RANKS)
            for rank, one in enumerate(everyone)
            if (text := _difference(everyone[0], one))
        ]
        if problems:
            raise ParallelError("the growth differs between ranks, so no rank has grown", problems)


def _difference(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The difference of a rank from rank 0, in a few words; empty if there is none."""
    if first["before"] != other["before"]:
        return f"{_differing(first['before'], other['before'])} differed from rank 0 before the growth already"
    if first["plans"] != other["plans"]:
        seeds = [[plan.get("seed") for plan in one["plans"]] for one in (first, other)]
        which = f": seed {seeds[1]} here, {seeds[0]} there" if seeds[0] != seeds[1] else ""
        return f"its plan differs from the plan of rank 0{which}"
    if first["after"] != other["after"]:
        return f"{_differing(first['after'], other['after'])} did not get the values of rank 0"
    return ""


def _differing(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    return next(name for name in (*one, *other) if one.get(name) != other.get(name))


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, int]:
    """A checksum per parameter of its bits and their positions along every axis, computed on the parameter's device."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    result = {}
    for name, parameter in model.named_parameters():
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        bits = real.detach().view(whole[real.element_size()])
        total = int(bits.sum(dtype=torch.int64))
        for axis in range(bits.ndim):
            others = [other for other in range(bits.ndim) if other != axis]
            sums = bits.sum(dim=others, dtype=torch.int64) if others else bits.long()
            total = (31 * total + int((sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum())) % 2**61
        result[name] = total
    return result


@contextlib.contextmanager
def together(
    given: Any,
    model: nn.Module,
    copies: Sequence[nn.Module],
    optimizers: Sequence[Any],
    example: Example,
    lengths: Sequence[int] | None = None,
) -> Iterator[Ranks]:
    """Surround a growth with the work on wrappers and ranks: it is the same on all ranks, or happens on none.

    given: the model or a wrapper around it.
    """
    wrappers = wrappers_around([model, *copies], given)
    check_renewable(wrappers)
    buffers: list[tuple[Tensor, Tensor]] = []
    with gathered([model, *copies], optimizers) as shards:
        ranks = Ranks(model, example, lengths, shards.group, again=shards.again)
        for wrapper in wrappers[:1]:
            if dist.get_world_size(wrapper.process_group) > 1:
                ranks.group, buffers = wrapper.process_group, _buffers_from_first(wrapper)
        try:
            if ranks.group is not None:
                ranks.before = checksums(model)
                ranks.example, ranks.lengths = _from_first(example, lengths, ranks.group)
            yield ranks
        except BaseException as error:
            with torch.no_grad():
                for buffer, old in buffers:
                    buffer.copy_(old)
            for wrapper in wrappers:  # restored tensors have new gradient accumulators, too
                renew(wrapper)
            if isinstance(error, Exception):
                ranks.report_failure(error)
            raise
    for wrapper in wrappers:
        renew(wrapper)


def _buffers_from_first(wrapper: DistributedDataParallel) -> list[tuple[Tensor, Tensor]]:
    """Broadcast rank 0's buffers, as the wrapper would before its next forward pass; returns this rank's previous ones."""
    wrapper._assign_modules_buffers()
    if not (wrapper.broadcast_buffers and wrapper.modules_buffers):
        return []
    before = [(buffer, buffer.detach().clone()) for buffer in wrapper.buffers()]
    wrapper._sync_buffers()
    return before


def _from_first(example: Example, lengths: Sequence[int] | None, group: Any) -> tuple[Example, Sequence[int] | None]:
    """The example with its tensors replaced by those of rank 0, and the lengths that rank 0 uses for the check."""
    leaves, form = tree_flatten(example)
    mine = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    sent: list[Any] = [[leaves[index].detach().cpu() for index in mine], lengths]
    dist.broadcast_object_list(sent, src=dist.get_global_rank(group, 0), group=group)
    if len(sent[0]) != len(mine):
        raise GrowthError(
            f"the example has {len(mine)} tensors here and {len(sent[0])} on rank 0: pass the same kind everywhere"
        )
    for index, tensor in zip(mine, sent[0], strict=True):
        leaves[index] = tensor.to(leaves[index].device)
    result: Example = tree_unflatten(leaves, form)
    return result, sent[1]
