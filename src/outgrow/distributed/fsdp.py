"""Growth of sharded models (FSDP2's `fully_shard`): gather, grow plain tensors, and shard again with the user's function.

    DTensor parameters, gradients, moments  →  whole plain tensors on every rank  →  the growth  →  shard(model)  →  DTensors

`fully_shard` changes the classes of modules, adds hooks and a state, and replaces parameters by DTensors. All of this is undone
before the growth, so that the growth is an ordinary one, and done again by the user's function, which `shard` stores: new
blocks are then sharded as that function says. If the growth is refused, everything is restored; no values have been sent
except to gather.

During the growth every rank holds the whole model, its gradients and the optimizer's state, besides its own shards, and the
growth's old and new tensors one at a time. Sharding creates new parameters: optimizers that are passed to the growth get them;
an optimizer that was left out raises at its next step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from outgrow.errors import ParallelError, Problem
from outgrow.model.dtensor import is_dtensor, placed
from outgrow.model.journal import Journal
from outgrow.modules.gates import gates_of
from outgrow.optimizers.stale import watch_for_gone
from outgrow.optimizers.wrappers import unwrapped
from outgrow.wrong_arguments import usage

M = TypeVar("M", bound=nn.Module)
HOW = "_outgrow_shard"
MANAGED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
USE_SHARD = "shard it with outgrow.shard(model, function), where function(model) calls fully_shard"
STEP_FIRST = "make the optimizer's step first, or delete the gradients: optimizer.zero_grad()"

How = Callable[[Any], object]


@usage("outgrow.shard(model, function)")
def shard(model: M, how: How) -> M:
    """Shard a model with a function, and store the function: growths shard the model again with it. Returns the model.

    A model that is already sharded stays unchanged. Make the optimizer after this, as always with `fully_shard`:

        def how(model):
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        outgrow.shard(model, how)
        optimizer = torch.optim.AdamW(model.parameters())
        ...
        outgrow.deepen(model, example, "blocks.3", optimizer=optimizer)    # on every rank

    Example:
        >>> sharded = []
        >>> model = shard(nn.Linear(2, 3), lambda model: sharded.append(type(model).__name__))
        >>> sharded
        ['Linear']
    """
    if not isinstance(model, nn.Module):
        raise ParallelError(f"the model is of type {type(model).__name__}: write outgrow.shard(model, function)")
    if not callable(how):
        raise ParallelError(f"how={how!r}: pass a function that calls fully_shard on the model and its parts")
    if not is_sharded(model):
        how(model)
    vars(model)[HOW] = how
    return model


def is_sharded(model: Any) -> bool:
    """Whether any part of a model is sharded.

    Between a forward and a backward pass parameters may be whole, but the class of the module shows it.
    """
    return isinstance(model, nn.Module) and any(_in_shards(module) for module in model.modules())


def group_of(model: nn.Module) -> Any:
    """The process group that holds a sharded model; None if the model is not sharded."""
    shards = (parameter for parameter in model.parameters() if is_dtensor(parameter))
    return next((_group(parameter) for parameter in shards), None)


@torch.no_grad()
def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with sharded ones gathered one by one: on rank 0 in CPU memory, on other ranks an empty tensor.

    A tensor with two names is one tensor afterwards, too.
    """
    known: dict[int, Tensor] = {}
    for tensor in tensors.values():
        if is_dtensor(tensor) and id(tensor) not in known:
            gathered = _whole(tensor, tensor)
            known[id(tensor)] = gathered.cpu() if dist.get_rank(_group(tensor)) == 0 else gathered.new_empty(0)
    return {name: known.get(id(tensor), tensor) for name, tensor in tensors.items()}


def _in_shards(module: nn.Module) -> bool:
    ours = any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
    return ours or any(is_dtensor(parameter) for parameter in module._parameters.values())


@dataclass(eq=False)
class Shards:
    """The gathered models, and how to shard them again."""

    roots: Sequence[tuple[nn.Module, How]] = ()
    optimizers: Sequence[Optimizer] = ()
    journal: Journal = field(default_factory=Journal)
    group: Any = None
    gone: list[tuple[Tensor, str]] = field(default_factory=list)

    def again(self) -> None:
        """Shard the models as they are now, with their gradients and optimizer states."""
        places = {id(p): (p, module, name) for root, _ in self.roots for p, module, name in _places(root)}
        for root, how in self.roots:
            how(root)
        kinds = {type(module._parameters[name]).__name__ for _, module, name in places.values()}
        if self.roots and "DTensor" not in kinds:
            raise ParallelError("the function that shards the model did not shard it again", [Problem("", USE_SHARD)])
        after = {key: (plain, _held(module, name)) for key, (plain, module, name) in places.items()}
        for plain, new in after.values():
            if new is not plain and plain.grad is not None:
                new.grad = placed(plain.grad, new)
        _exchange(self.optimizers, {key: new for key, (_, new) in after.items()}, placed, self.journal)
        _set_clocks(self.roots, {key: new for key, (_, new) in after.items()}, self.journal)


def _held(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _places(root: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Module, str]]:
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield parameter, module, name


@contextlib.contextmanager
def gathered(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[Shards]:
    """Make sharded models plain inside a block, which should call `Shards.again` at its end; a failure restores everything."""
    sharded = [model for model in models if is_sharded(model)]
    if not sharded:
        yield Shards()
        return
    shards = Shards(_roots(sharded), unwrapped(optimizers))
    try:
        _gather(shards)
        yield shards
    except BaseException:
        shards.journal.undo()
        raise
    shards.journal.close()
    watch_for_gone(shards.gone)


@contextlib.contextmanager
def seen_whole(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[bool]:
    """Make sharded models plain inside a block that only reads them, and restore them. Yields whether any is sharded."""
    sharded = [model for model in models if is_sharded(model)]
    if not sharded:
        yield False
        return
    shards = Shards(_roots(sharded), unwrapped(optimizers))
    try:
        _gather(shards)
        yield True
    finally:
        shards.journal.undo()


def _roots(models: Sequence[nn.Module]) -> list[tuple[nn.Module, How]]:
    """The modules that `shard` has sharded, each with its function."""
    from torch.distributed.fsdp import FSDPModule

    roots = [(module, vars(module)[HOW]) for model in models for module in model.modules() if HOW in vars(module)]
    inside = {id(module) for root, _ in roots for module in root.modules()}
    parts = [(path, module) for model in models for path, module in model.named_modules() if _in_shards(module)]
    left = [path or "the model" for path, module in parts if id(module) not in inside]
    problems = [Problem(path, "it is sharded, and a growth has to gather it", USE_SHARD) for path in left[:1]]
    for root, _ in roots:
        for path, module in root.named_modules():
            parameters = _managed(module) if isinstance(module, FSDPModule) else []
            if any(getattr(parameter, "is_dtensor", False) for parameter in parameters):
                problems.append(Problem(path, "it is tensor-parallel too, which outgrow can't remove", "grow it before that"))
            if any(_pending(parameter) for parameter in parameters):
                problems.append(Problem(path, "it holds gradients that are not reduced yet", STEP_FIRST))
    if problems:
        raise ParallelError("a sharded model can't be grown", problems)
    return roots


def _managed(module: Any) -> list[Any]:
    """The objects in which `fully_shard` manages the parameters of a module's group."""
    return [parameter for group in _groups(module._get_fsdp_state()) for parameter in group.fsdp_params]


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in (state._fsdp_param_group,) if group is not None]


def _pending(parameter: Any) -> bool:
    """Whether this rank holds gradients that are not reduced, because of set_requires_gradient_sync(False)."""
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


@torch.no_grad()
def _gather(shards: Shards) -> None:
    """Replace shards by whole tensors, in the same order on all ranks, and remove what `fully_shard` has added."""
    from torch.distributed.fsdp import FSDPModule

    modules = list({id(module): module for root, _ in shards.roots for module in root.modules()}.values())
    for module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in modules:
        _note_module(module, shards.journal)
    wholes: dict[int, nn.Parameter] = {}
    for root, _ in shards.roots:
        for name, parameter in root.named_parameters():
            if is_dtensor(parameter):
                shards.group = shards.group or _group(parameter)
                wholes[id(parameter)] = nn.Parameter(_whole(parameter, parameter), requires_grad=parameter.requires_grad)
                if parameter.grad is not None:
                    wholes[id(parameter)].grad = _whole(parameter.grad, parameter)
                shards.gone.append((parameter, name))
    for module in modules:
        if isinstance(module, FSDPModule):
            _strip(module)
        for mark in MANAGED:
            vars(module).pop(mark, None)
        for name in module._parameters:
            module._parameters[name] = wholes.get(id(module._parameters[name]), module._parameters[name])
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
    _exchange(shards.optimizers, wholes, _whole, shards.journal)
    _set_clocks(shards.roots, wholes, shards.journal)


def _whole(value: Any, parameter: Tensor) -> Tensor:
    """The whole tensor of shards; offloaded shards are first moved to the device through which ranks communicate."""
    if value.shape != parameter.shape:
        reason = f"state of shape {tuple(value.shape)} is sharded differently from its parameter, and can't be sharded again"
        raise ParallelError(
            "a sharded model can't be grown", [Problem("the optimizer", reason, "leave it out, and make a new one")]
        )
    result: Tensor = value.detach().to(value.device_mesh.device_type).full_tensor()
    return result.clone()


def _group(parameter: Any) -> Any:
    """The process group that holds a parameter."""
    mesh = parameter.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh.get_group(mesh.ndim - 1)


def _exchange(
    optimizers: Sequence[Optimizer],
    others: Mapping[int, nn.Parameter],
    moved: Callable[[Any, Any], Any],
    journal: Journal,
) -> None:
    """Replace the parameters of optimizers, and convert the tensors of their state with `moved`."""
    for optimizer in optimizers:
        held = [group["params"] for group in optimizer.param_groups]
        journal.note(partial(_restore_optimizer, optimizer, dict(optimizer.state), held))
        for group in optimizer.param_groups:
            for old in group["params"]:
                if id(old) in others and old in optimizer.state:
                    state, new = optimizer.state.pop(old), others[id(old)]
                    whole = old if is_dtensor(old) else new
                    optimizer.state[new] = {key: _moved(value, old, whole, moved) for key, value in state.items()}
            group["params"] = [others.get(id(old), old) for old in group["params"]]


def _moved(value: Any, old: Tensor, like: Any, moved: Callable[[Any, Any], Any]) -> Any:
    """Convert a value of an optimizer's state: gather it if it is sharded, or shard it if it is a tensor with axes."""
    if is_dtensor(old):
        return moved(value, like) if is_dtensor(value) else value
    return moved(value, like) if isinstance(value, Tensor) and value.ndim else value


def _restore_optimizer(optimizer: Optimizer, state: Mapping[Any, Any], held: Sequence[list[Tensor]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, parameters in zip(optimizer.param_groups, held, strict=True):
        group["params"] = parameters


def _set_clocks(roots: Sequence[tuple[nn.Module, How]], others: Mapping[int, nn.Parameter], journal: Journal) -> None:
    """Let unfinished fades count the steps of the new parameters instead of the replaced ones."""
    for root, _ in roots:
        for gate in gates_of(root).values():
            if id(gate.clock) in others:
                journal.note(partial(setattr, gate, "clock", gate.clock))
                gate.clock = others[id(gate.clock)]


def _note_module(module: nn.Module, journal: Journal) -> None:
    """Let the journal restore a module: class, attributes, contents of dicts (parameters, hooks), and FSDP state."""
    from torch.distributed._composable_state import _module_state_mapping as states

    kind, attributes, state = type(module), dict(vars(module)), states.get(module)
    dicts = [(value, dict(value)) for value in attributes.values() if isinstance(value, dict)]

    def put_back() -> None:
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(attributes)
        for held, before in dicts:
            held.clear()
            held.update(before)
        states.pop(module, None)
        if state is not None:
            states[module] = state

    journal.note(put_back)


def _strip(module: Any) -> None:
    """Remove from a module what `fully_shard` has added."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in _groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [parameter._post_load_hook_handle for parameter in group.fsdp_params]
    for handle in handles:
        handle.remove()
    module.__class__ = type(module).__mro__[type(module)._orig_cls_mro_index]
    del _module_state_mapping[module]
    others = {key: value for key, value in vars(module)[STATE_KEY].items() if value is not state}
    for key, kept in ((STATE_KEY, others), (REGISTRY_KEY, _without(vars(module)[REGISTRY_KEY], "fully_shard"))):
        del vars(module)[key]
        if kept:
            vars(module)[key] = kept


def _without(registry: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in registry.items() if key != name}
