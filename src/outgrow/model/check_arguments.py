"""Check the arguments of a growth before anything is traced, and refuse unsupported ones with the reason."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outgrow.errors import GrowthError, Problem, TraceError
from outgrow.model.dtensor import is_dtensor
from outgrow.model.sandbox import forget_caches, tensors_of
from outgrow.model.shared_memory import overlapping_pair
from outgrow.model.unwrap import bare

FAMILY = "outgrow.families.family", "Family"  # the class, which this folder does not import
DISTRIBUTED = ("DistributedDataParallel", "FullyShardedDataParallel")


def check_model(model: Any, values: bool = True) -> None:
    """Check that the model can be traced and has parameters. values: whether its tensors need values (not the meta device)."""
    check_module(model, values)
    if not any(True for _ in model.parameters()):
        raise GrowthError("the model has no parameters: there is nothing that could grow")


def check_module(model: Any, values: bool = True) -> None:
    """Check that the model is a traceable module of Python code. values: see `check_model`."""
    if not isinstance(model, nn.Module):
        raise GrowthError(f"the model is {_named(model)}: pass a torch.nn.Module")
    kinds = [
        (path, [(kind.__module__, kind.__name__) for kind in type(module).__mro__]) for path, module in model.named_modules()
    ]
    families = [path for path, names in kinds if FAMILY in names]
    if families:
        reason = "it is an outgrow.Family, and its smaller members use parts of the largest member's parameters"
        way_out = "family.grow(transforms) adds a size; other calls take one member: family[-1], or a copy, family.extract(0)"
        raise GrowthError("a family can't be grown as one model", [Problem(families[0] or "the model", reason, way_out)])
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        reason = "torch.jit has compiled it, so sizes in its code can be neither traced nor changed"
        way_out = (
            "grow the Python module, then script or trace it again; where a library scripts its own layers, build the model "
            "without that (e3nn: e3nn.set_optimization_defaults(jit_script_fx=False))"
        )
        raise TraceError("a scripted model can't be grown", [Problem(scripted[0] or "the model", reason, way_out)])
    wrapped = [path or "the model" for path, module in model.named_modules() if type(module).__name__ in DISTRIBUTED]
    if wrapped:
        reason = "it averages gradients of the parameters that it was constructed with, and new ones would be missing"
        way_out = "grow the module inside it (model.module) on every process with the same seed, then wrap it again"
        raise TraceError("a model wrapped for distributed training can't be grown", [Problem(wrapped[0], reason, way_out)])
    sharded = [name for name, parameter in model.named_parameters() if is_dtensor(parameter)]
    if sharded:
        problem = Problem(sharded[0], "it is sharded (a DTensor)", "pass a plain copy of the model, made before sharding")
        raise TraceError("a sharded model can't be traced", [problem])
    packed = packed_tensor(model)
    if packed is not None:
        raise TraceError("a quantised model can't be grown", [packed])
    parts = [name for name, parameter in model.named_parameters() if not parameter.is_leaf]
    if parts:
        reason = "it is computed from another tensor, as in a smaller member of a family"
        way_out = "add a size to the family (family.grow), or grow a stand-alone copy of the member (family.extract)"
        raise TraceError("a model whose parameters are parts of others can't be grown", [Problem(parts[0], reason, way_out)])
    lazy = [path for path, module in model.named_modules() if getattr(module, "has_uninitialized_params", bool)()]
    if lazy:
        problem = Problem(lazy[0], "its parameters have no shape yet", "run the model once first: model(example)")
        raise TraceError("the model has lazy modules", [problem])
    if torch.is_inference_mode_enabled() or any(parameter.is_inference() for parameter in model.parameters()):
        raise TraceError("operators can't be recorded in inference mode: call this outside torch.inference_mode()")
    shared = overlapping_pair(tensors_of(model))
    if shared is not None:
        reason = f"it shares memory with {shared[1]}, but is a separate tensor"
        way_out = "make both one parameter (a.weight = b.weight), or copy one of them: a.weight.data = b.weight.data.clone()"
        raise TraceError("tensors that share memory can't be grown", [Problem(shared[0], reason, way_out)])
    without = [name for name, tensor in tensors_of(model).items() if tensor.is_meta]
    if without and values:
        problem = Problem(without[0], "it is on the meta device", "load the weights first; outgrow.timeline needs none")
        raise TraceError("the model's tensors have no values", [problem])
    try:
        forget_caches(model)
    except Exception as error:
        raise TraceError(
            f"the model can't be put into train mode: {type(error).__name__}: {error}. For a model "
            "from torch.export, grow the module that it was exported from"
        ) from error


def packed_tensor(model: nn.Module) -> Problem | None:
    """The problem with the first tensor that stands for several packed ones, as in a quantised model; None if there is none."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_traceable_wrapper_subclass(tensor) and not is_dtensor(tensor):
            library = type(tensor).__module__.partition(".")[0]
            reason = f"it is of {library}'s class {type(tensor).__name__}, which packs its values into other tensors"
            return Problem(name, reason, "grow and save the model before quantising it, then quantise the grown model")
    return None


def check_finite(model: nn.Module) -> None:
    """Check that all parameters are finite: a model whose training has diverged can't be grown.

    A sum with an infinity or a NaN in it is not finite; checking sums is far quicker than checking each value, and synchronises
    with the device only once. If a sum is not finite, each value is checked, since a sum may overflow.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = {name: torch.view_as_real(tensor) if tensor.is_complex() else tensor for name, tensor in tensors.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    if all(isfinite(total) for total in _sums(list(tensors.values()))):
        return
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            problem = Problem(name, "it holds NaN or infinity", "go back to weights from before training diverged")
            raise GrowthError("the model's values are not finite", [problem])


def _sums(tensors: Sequence[torch.Tensor]) -> list[float]:
    by_type: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
        by_type[total.device, total.dtype].append(total)
    return [total for totals in by_type.values() for total in torch.stack(totals).tolist()]


def check_averages(averages: Sequence[Any], model: nn.Module) -> None:
    """Check that averages are copies of the model: tensors of the same names and shapes, none of them shared."""
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
            raise GrowthError("the averaged copy shares tensors with the model", [Problem(shared[0], "it would grow twice")])


def check_seed(seed: Any) -> None:
    try:
        operator.index(seed)
    except TypeError:
        raise GrowthError(f"seed={seed!r}: write a whole number") from None


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise GrowthError(f"{name}={value!r}: write True or False")


def _named(thing: Any) -> str:
    return (
        f"the class {thing.__name__}, not an instance of it" if isinstance(thing, type) else f"of type {type(thing).__name__}"
    )
