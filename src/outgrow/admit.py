"""Look at what a growth is given before anything is traced, and refuse what it can't work on, with the reason."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outgrow.errors import GrowthError, Problem, TraceError
from outgrow.sandbox import forget_caches, tensors_of


def check_model(model: Any) -> None:
    """A module of Python code, with numbers in it."""
    if not isinstance(model, nn.Module):
        raise GrowthError(f"the model is {_named(model)}: pass a torch.nn.Module")
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        reason = "torch.jit has compiled it, and what its code says of sizes can be neither watched nor changed"
        problem = Problem(scripted[0] or "the model", reason, "grow the Python module, then script or trace it again")
        raise TraceError("a scripted model can't be grown", [problem])
    if not any(True for _ in model.parameters()):
        raise GrowthError("the model has no parameters: there is nothing that could grow")
    without = [name for name, tensor in tensors_of(model).items() if tensor.is_meta]
    if without:
        problem = Problem(without[0], "it is on the meta device", "load the model's weights first, e.g. model.to_empty(…)")
        raise TraceError("the model's tensors have no numbers", [problem])
    try:
        forget_caches(model)
    except Exception as error:
        raise TraceError(
            f"the model does not let itself be put into train mode: {type(error).__name__}: {error}. A model from torch.export "
            "is one: grow the module that it was made from"
        ) from error


def check_averages(averages: Sequence[Any], model: nn.Module) -> None:
    """Copies of the model: other modules with the same tensors."""
    tensors = tensors_of(model)
    for average in averages:
        copy = getattr(average, "module", average)
        if not isinstance(copy, nn.Module):
            raise GrowthError(
                f"average= is {_named(average)}: pass a copy of the model, or torch.optim.swa_utils.AveragedModel"
            )
        theirs = tensors_of(copy)
        shared = [name for name, tensor in tensors.items() if theirs.get(name) is tensor]
        other = [name for name, tensor in tensors.items() if name not in theirs or theirs[name].shape != tensor.shape]
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
