"""Look at what a growth is given before anything is traced, and refuse what it can't work on, with the reason."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn

from outgrow.errors import GrowthError, Problem, TraceError
from outgrow.model.dtensor import is_dtensor
from outgrow.model.sandbox import forget_caches, tensors_of
from outgrow.model.shared_memory import two_that_overlap
from outgrow.model.unwrap import bare

DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel")


def check_model(model: Any, numbers: bool = True) -> None:
    """A module that can be watched, with parameters that can grow."""
    check_module(model, numbers)
    if not any(True for _ in model.parameters()):
        raise GrowthError("the model has no parameters: there is nothing that could grow")


def check_module(model: Any, numbers: bool = True) -> None:
    """A module of Python code, with numbers in it unless it will do without."""
    if not isinstance(model, nn.Module):
        raise GrowthError(f"the model is {_named(model)}: pass a torch.nn.Module")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        reason = "torch.jit has compiled it, and what its code says of sizes can be neither watched nor changed"
        problem = Problem(scripted[0] or "the model", reason, "grow the Python module, then script or trace it again")
        raise TraceError("a scripted model can't be grown", [problem])
    wrapped = [path or "the model" for path, module in model.named_modules() if type(module).__name__ in DISTRIBUTED]
    if wrapped:
        reason = "it averages the gradients of the parameters it was given, and would not see new ones"
        way_out = "grow the module inside it (model.module) on every process with the same seed, then wrap it again"
        raise TraceError("a model wrapped for distributed training can't be grown", [Problem(wrapped[0], reason, way_out)])
    sharded = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if sharded:
        problem = Problem(sharded[0], "it is in shards (a DTensor)", "look at a plain copy of the model, before it is sharded")
        raise TraceError("a sharded model can't be watched", [problem])
    lazy = [path for path, module in model.named_modules() if getattr(module, "has_uninitialized_params", bool)()]
    if lazy:
        problem = Problem(lazy[0], "its parameters have no shape yet", "run the model once first: model(example)")
        raise TraceError("the model has lazy modules", [problem])
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise TraceError("operators can't be watched in inference mode: call this outside torch.inference_mode()")
    shared = two_that_overlap(tensors_of(model))
    if shared is not None:
        reason = f"it lies in the same memory as {shared[1]}, but is a tensor of its own"
        way_out = "make both one parameter (a.weight = b.weight), or copy one of them: a.weight.data = b.weight.data.clone()"
        raise TraceError("tensors that share memory can't be grown", [Problem(shared[0], reason, way_out)])
    without = [name for name, tensor in tensors_of(model).items() if tensor.is_meta]
    if without and numbers:
        problem = Problem(without[0], "it is on the meta device", "load the model's weights first, e.g. model.to_empty(…)")
        raise TraceError("the model's tensors have no numbers", [problem])
    try:
        forget_caches(model)
    except Exception as error:
        raise TraceError(
            f"the model does not let itself be put into train mode: {type(error).__name__}: {error}. A model from torch.export "
            "is one: grow the module that it was made from"
        ) from error


def check_finite(model: nn.Module) -> None:
    """Numbers that can be grown: from a training that has diverged there is nothing to go on with.

    A sum with an infinity or a NaN in it is none either; that is far quicker than a look at each number, and waits only once
    for the device. Sums that overflow are looked at closely.
    """
    numbers = {name: parameter.detach() for name, parameter in model.named_parameters()}
    numbers = {name: torch.view_as_real(tensor) if tensor.is_complex() else tensor for name, tensor in numbers.items()}
    numbers = {name: tensor for name, tensor in numbers.items() if tensor.is_floating_point()}
    if all(isfinite(total) for total in _sums(list(numbers.values()))):
        return
    for name, tensor in numbers.items():
        if not bool(torch.isfinite(tensor).all()):
            problem = Problem(name, "it holds NaN or infinity", "go back to weights from before training diverged")
            raise GrowthError("the model's numbers are not finite", [problem])


def _sums(tensors: Sequence[torch.Tensor]) -> list[float]:
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        alike[total.device, total.dtype].append(total)
    return [number for totals in alike.values() for number in torch.stack(totals).tolist()]


def check_averages(averages: Sequence[Any], model: nn.Module) -> None:
    """Copies of the model: other modules with the same tensors."""
    tensors = tensors_of(model)
    for average in averages:
        copy = bare(getattr(average, "module", average))
        if not isinstance(copy, nn.Module):
            raise GrowthError(
                f"average= is {_named(average)}: pass a copy of the model, or torch.optim.swa_utils.AveragedModel"
            )
        theirs = tensors_of(copy)
        shared = [name for name, tensor in tensors.items() if theirs.get(name) is tensor]
        other = [name for name, tensor in tensors.items() if name not in theirs or theirs[name].shape != tensor.shape]
        other += [name for name in theirs if name not in tensors]
        if other:
            raise GrowthError("the averaged copy is of another model", [Problem(other[0], "it is not there in the same shape")])
        if shared:
            raise GrowthError("the averaged copy shares tensors with the model", [Problem(shared[0], "both grow it")])


def check_seed(seed: Any) -> None:
    try:
        operator.index(seed)
    except TypeError:
        raise GrowthError(f"seed={seed!r}: write a whole number") from None


def _named(thing: Any) -> str:
    return (
        f"the class {thing.__name__}, not an instance of it" if isinstance(thing, type) else f"of type {type(thing).__name__}"
    )
