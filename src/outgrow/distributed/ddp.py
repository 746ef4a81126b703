"""Growth in several processes: every rank grows alike, and DistributedDataParallel wrappers go on.

A wrapper averages gradients with a *reducer*, which holds the parameters, buckets of their sizes, and hooks on them. Kept over
a growth it would fail, or miss new parameters so that the ranks drift apart. `renew` builds the reducer anew inside the same
wrapper, so that whoever holds it (a training loop, Lightning's strategy, Accelerate) goes on with it. A growth does so for
every living wrapper around the model, whether it was given the wrapper or the module in it.

Ranks stay alike bit for bit if they grow alike. So, where a wrapper spans several ranks:

    before   tensors of the example come from rank 0, and so do buffers, if the wrapper sends them at its next forward anyway
    after    plans and checksums of the parameters are compared over all ranks; one that differs, or that refused the growth,
             is named, and then no rank has grown

Gradients are left as they are on each rank: under `no_sync` they are its own, and are averaged by the next backward pass.
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

ANEW = "grow the module in it (wrapper.module) once the wrapper is dropped (del wrapper), then wrap it again"
ALIKE = (
    "call the growth on every rank, with the same transforms and the same seed, on models that are alike. Where numbers come "
    "from batch statistics that are each rank's own (broadcast_buffers=False), make those alike first"
)


def renew(wrapper: DistributedDataParallel) -> None:
    """Let a DistributedDataParallel wrapper see its module as it is now: other shapes, other parameters.

    Growths do so by themselves. Nothing is sent between ranks, and gradients are left as they are.

    Raises ParallelError, and changes nothing, for what can't go on: communication hooks with a state of their own, DDP's own
    mixed precision, delayed all-reduce, optimizers that run within the backward pass, and the Python reducer.
    """
    check_renewable([wrapper])
    hooks, builtin = list(wrapper._comm_hooks), _builtin_hook(wrapper)
    wrapper._remove_autograd_hooks()
    del wrapper.reducer, wrapper.logger  # the accumulators it holds are of the old shapes, and go with it
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
    """`_set_static_graph` warns about both options, as the constructor did already."""
    unused, wrapper.find_unused_parameters = wrapper.find_unused_parameters, False
    yield
    wrapper.find_unused_parameters = unused


def _builtin_hook(wrapper: DistributedDataParallel) -> Any:
    """One of torch's own communication hooks written in C++: only the log tells of it."""
    name = str(wrapper._get_ddp_logging_data().get("comm_hook", ""))
    kinds = getattr(dist, "BuiltinCommHookType").__members__.values()  # noqa: B009
    return next((kind for kind in kinds if str(kind) == name), None)


def check_renewable(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise one error with all reasons why wrappers can't go on after a growth."""
    problems = []
    for wrapper in wrappers:
        states = [state for _, state in getattr(wrapper, "_comm_hooks", ())]
        reasons = {
            "mixed_precision=": wrapper.mixed_precision is not None,
            "delay_all_reduce_named_params=": bool(wrapper._delay_all_reduce_params),
            "the Python reducer (torch._dynamo.config.optimize_ddp)": wrapper._use_python_reducer,
            "an optimizer within the backward pass": any(hasattr(p, "_in_backward_optimizers") for p in wrapper.parameters()),
            "a communication hook with a state of its own (PowerSGD, say)": not all(
                state is None or isinstance(state, dist.ProcessGroup) for state in states
            ),
        }
        where = f"DistributedDataParallel around {type(wrapper.module).__name__}"
        problems += [
            Problem(where, f"it has {reason}, which is bound to the old shapes", ANEW)
            for reason, found in reasons.items()
            if found
        ]
    if problems:
        raise ParallelError("a wrapper can't follow the growth", problems)


def wrappers_around(models: Sequence[nn.Module], given: Any = None) -> list[DistributedDataParallel]:
    """All living DistributedDataParallel wrappers that any of these modules is in, the given one first."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(given, DistributedDataParallel):
        return [given, *(wrapper for wrapper in _around(models) if wrapper is not given)]
    found = [ref(wrapper) for wrapper in _around(models)]
    if found:
        gc.collect()  # one that was dropped may not have been collected yet, and that on one rank alone
    return [wrapper for each in found if (wrapper := each()) is not None]


def _around(models: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    kinds = {DistributedDataParallel}
    while more := {kind for known in kinds for kind in known.__subclasses__()} - kinds:
        kinds |= more
    # an object refers to its class. A list of all objects would hold, for a moment, tuples that other threads are still filling
    wrappers = [one for one in gc.get_referrers(*kinds) if type(one) in kinds and "module" in one._modules]
    known = {id(model) for model in models}
    return [wrapper for wrapper in wrappers if any(id(module) in known for module in wrapper.modules())]


def renew_around(models: Sequence[nn.Module]) -> None:
    for wrapper in wrappers_around(models):
        renew(wrapper)


@dataclass(eq=False)
class Ranks:
    """The processes that take part in a growth; without a group, this one alone."""

    model: nn.Module
    example: Example
    lengths: Sequence[int] | None = None  # of the part of the example that will do
    group: Any = None
    before: Mapping[str, int] = field(default_factory=dict)
    again: Callable[[], None] = lambda: None
    agreed: bool = False

    def conclude(self, plans: Sequence[Plan]) -> None:
        """Raise, on all ranks, if the growth did not come out alike on all of them; then shard again what was sharded."""
        if self.group is not None:
            after = checksums(self.model)
            self._compare({"plans": [plan.to_json() for plan in plans], "before": self.before, "after": after})
        self.again()

    def tell(self, error: Exception) -> None:
        """Let the other ranks know that this one has not grown."""
        if self.group is not None and not self.agreed:
            with contextlib.suppress(ParallelError):
                self._compare({"refused": str(error) or type(error).__name__})

    def _compare(self, mine: Mapping[str, Any]) -> None:
        self.agreed = True
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        refused = [Problem(f"rank {rank}", one["refused"]) for rank, one in enumerate(everyone) if "refused" in one]
        if refused:
            raise ParallelError("a rank refused the growth, so that none has grown", refused)
        problems = [
            Problem(f"rank {rank}", text, ALIKE) for rank, one in enumerate(everyone) if (text := _told(everyone[0], one))
        ]
        if problems:
            raise ParallelError("the ranks did not grow alike, so that none has grown", problems)


def _told(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How a rank differs from rank 0, in a few words; empty if it does not."""
    if first["before"] != other["before"]:
        return f"{_differing(first['before'], other['before'])} was not as on rank 0, before the growth already"
    if first["plans"] != other["plans"]:
        seeds = [[plan.get("seed") for plan in one["plans"]] for one in (first, other)]
        which = f": seed {seeds[1]} here, {seeds[0]} there" if seeds[0] != seeds[1] else ""
        return f"its plan is not that of rank 0{which}"
    if first["after"] != other["after"]:
        return f"{_differing(first['after'], other['after'])} did not get the numbers of rank 0"
    return ""


def _differing(one: Mapping[str, int], other: Mapping[str, int]) -> str:
    return next(name for name in (*one, *other) if one.get(name) != other.get(name))


@torch.no_grad()
def checksums(model: nn.Module) -> dict[str, int]:
    """A number for each parameter that tells its bits and, along every axis, their places; found where the parameter is."""
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
    """A growth of the model in what was given, with all that is around it: alike on all ranks, or on none."""
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
            for wrapper in wrappers:  # tensors that were put back have new gradient accumulators, too
                renew(wrapper)
            if isinstance(error, Exception):
                ranks.tell(error)
            raise
    for wrapper in wrappers:
        renew(wrapper)


def _buffers_from_first(wrapper: DistributedDataParallel) -> list[tuple[Tensor, Tensor]]:
    """Send rank 0's buffers, as the wrapper would before its next forward pass; returns those that were here."""
    wrapper._assign_modules_buffers()
    if not (wrapper.broadcast_buffers and wrapper.modules_buffers):
        return []
    before = [(buffer, buffer.detach().clone()) for buffer in wrapper.buffers()]
    wrapper._sync_buffers()
    return before


def _from_first(example: Example, lengths: Sequence[int] | None, group: Any) -> tuple[Example, Sequence[int] | None]:
    """The example with the tensors of rank 0's, where this rank has its own; and which part of it rank 0 looks at."""
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
