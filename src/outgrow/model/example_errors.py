"""The error for a model that does not run on an example: the module, what it got, torch's reason, and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.errors import ExampleError, Problem
from outgrow.model.example import Example, describe_example, tensors_in
from outgrow.model.sandbox import tensors_of

FORMS = "a tensor, a tuple of positional arguments, or a dict of keyword arguments"
LONGEST = 120  # characters of a module's description
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Failure:
    """A model and an example on which it failed; the innermost module that failed, its path, and the tensors that it got."""

    model: nn.Module
    example: Any
    place: str
    module: nn.Module
    inputs: tuple[Tensor, ...]


def does_not_run(model: nn.Module, example: Example, error: Exception) -> ExampleError:
    """The error to raise from another one that a model raised on an example."""
    failure = _failure(model, example, error)
    got = f" on {describe_example(failure.inputs)}" if failure.inputs else ""
    shown = repr(failure.module)
    name = shown if "\n" not in shown and len(shown) <= LONGEST else type(failure.module).__name__
    way_out = next(filter(None, (found(failure) for found in WAYS_OUT)))
    problem = Problem(failure.place or "the model", f"{name} failed{got}; the example is {describe_example(example)}", way_out)
    return ExampleError(f"the model does not run on the example: {type(error).__name__}: {error}", [problem])


def _failure(model: nn.Module, example: Any, error: Exception) -> Failure:
    """The innermost module of the model in whose forward an error arose, from the error's traceback."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = Failure(model, example, "", model, ())
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module) and id(owner) in paths:
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            given = (frame.f_locals.get(name) for name in names)
            inputs = tuple(value for value in given if isinstance(value, Tensor))
            found = Failure(model, example, paths[id(owner)], owner, inputs)
    return found


def _no_tensors(failure: Failure) -> str:
    if tensors_in(failure.example):
        return ""
    arrays = "" if isinstance(failure.example, (tuple, list, Mapping)) else ", with torch.as_tensor(…) for arrays"
    return f"pass example= {FORMS}{arrays}"


def _arguments(failure: Failure) -> str:
    """The way out if the example has other arguments than the model's forward."""
    example = failure.example
    named = dict(example) if isinstance(example, Mapping) else {}
    args = tuple(example) if isinstance(example, (tuple, list)) else () if isinstance(example, Mapping) else (example,)
    try:
        signature = inspect.signature(failure.model.forward)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **named)
    except TypeError:
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [one.name for one in signature.parameters.values() if one.default is one.empty and one.kind not in optional]
        names = ", ".join(required) + ("," if len(required) == 1 else "")
        return f"forward takes {signature}: pass example=({names}), or a dict of these names"
    return ""


def _device(failure: Failure) -> str:
    own = {tensor.device.type for tensor in tensors_of(failure.model).values()}
    found = {tensor.device.type for tensor in tensors_in(failure.example)}
    if len(own) != 1 or found <= own:
        return ""
    return f"the model is on {next(iter(own))}, the example on {', '.join(sorted(found - own))}: move one of them with .to(…)"


def _kinds(failure: Failure) -> str:
    """The way out if the example has another dtype than the model."""
    if isinstance(failure.module, EMBEDDINGS):
        floating = any(tensor.is_floating_point() for tensor in failure.inputs)
        return "an embedding takes indices: pass integers, e.g. tokens.long()" if floating else ""
    own = {tensor.dtype for tensor in tensors_of(failure.model).values() if tensor.is_floating_point()}
    floats = [tensor.dtype for tensor in tensors_in(failure.example) if tensor.is_floating_point()]
    embeds = any(isinstance(module, EMBEDDINGS) for module in failure.model.modules())
    if len(own) != 1 or (floats and set(floats) == own):
        return ""
    kind = next(iter(own))
    if not floats:
        return "" if embeds else f"the model is {_short(kind)}, the example has no floats: pass example.to({kind})"
    other = floats[0]
    return f"the model is {_short(kind)}, the example {_short(other)}: pass example.to({kind}), or model.to({other})"


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _other_inputs(failure: Failure) -> str:
    if isinstance(failure.module, EMBEDDINGS):
        return f"pass indices below {failure.module.num_embeddings}, e.g. a batch of the training data"
    return f"pass an input on which the model runs, e.g. a batch of the training data: {FORMS}"


WAYS_OUT: tuple[Callable[[Failure], str], ...] = (_no_tensors, _arguments, _device, _kinds, _other_inputs)
