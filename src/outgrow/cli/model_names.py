"""Build the model that a command names, timm:NAME or MODULE:CALLABLE, and an example input for it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


class CommandError(Exception):
    """A command that can't be carried out; the message has one line."""


@dataclass(frozen=True)
class InputShape:
    """The default input shape of a model, without the batch."""

    sizes: tuple[int, ...]


def input_shape(text: str) -> tuple[int, ...]:
    """The shape of an input without the batch, from e.g. 3,224,224."""
    sizes = re.split(r" *[,x] *", text.strip("()[] ").removesuffix(","))
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: write positive integers with commas, e.g. 3,224,224")
    return tuple(map(int, sizes))


def named_model(source: str, shapes: Sequence[tuple[int, ...]] | None, batch: int, dtype: str | None) -> tuple[nn.Module, Any]:
    """A model and an example input: of the given shapes, or else the model's default."""
    model, example = build(source)
    if shapes:
        example = make_example(shapes, batch, dtype)
    elif isinstance(example, InputShape):
        example = make_example([example.sizes], batch, dtype)
    elif example is None:
        raise CommandError(f"{source} has no example input: add --input 3,224,224 (a shape without the batch), "
                           "or let it return (model, example)")  # fmt: skip
    if dtype and _torch_dtype(dtype).is_floating_point:
        model, example = model.to(_torch_dtype(dtype)), _converted(example, _torch_dtype(dtype))
    return model, example


def build(source: str) -> tuple[nn.Module, Any]:
    """A model, and its example: data, an `InputShape`, or None."""
    from torch import nn

    library, _, name = source.partition(":")
    if not name:
        raise CommandError(f"{source} is neither a file nor a model: write timm:resnet18, module:callable or a path")
    if library == "timm":
        return _build_timm(name)
    found = _import_attribute(source, library, name)
    made = found if isinstance(found, nn.Module) else _call(source, found)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CommandError(f"{source} returns a {type(made).__name__}: it must return a model, or (model, example)")
    return model, example


def build_object(source: str) -> Any:
    """The result of a function of the user's, MODULE:CALLABLE."""
    library, _, name = source.partition(":")
    if not library or not name:
        raise CommandError(f"{source} does not name a function: write MODULE:CALLABLE, e.g. mycode.search:describe")
    return _call(source, _import_attribute(source, library, name))


def _import_attribute(source: str, library: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = with_torchvision(lambda: importlib.import_module(library))
    except Exception as error:
        raise CommandError(f"{source}: can't import {library}: {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise CommandError(f"{source}: {error}") from error


def _call(source: str, function: Any) -> Any:
    if not callable(function):
        raise CommandError(f"{source} is a {type(function).__name__}: name a model, or a function that returns one")
    try:
        return with_torchvision(function)
    except Exception as error:
        raise CommandError(f"{source}() failed with {type(error).__name__}: {error}") from error


def _build_timm(name: str) -> tuple[nn.Module, InputShape | None]:
    try:
        timm = with_torchvision(lambda: importlib.import_module("timm"))
    except ImportError as error:
        raise CommandError(f"timm can't be imported ({error}): pip install timm") from error
    if not timm.is_model(name.partition(".")[0]):
        import difflib

        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f": did you mean {', '.join(near)}?" if near else ": timm.list_models() lists them"
        raise CommandError(f"timm has no model {name}{hint}")
    model: nn.Module = timm.create_model(name, pretrained=False)
    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    size = settings.get("input_size")
    return model, InputShape(tuple(size)) if size else None


def with_torchvision(action: Callable[[], Any]) -> Any:
    """Call a function that may import torchvision, and once more with stand-ins if torchvision's operators are missing.

    At import, torchvision's wheel describes its operators, and fails with a torch without CUDA, which does not register them.
    A model's layers need none of these operators, so stand-ins of the same names are enough.
    """
    try:
        return action()
    except Exception as error:
        cause: BaseException | None = error  # libraries raise their own errors from it
        while cause is not None and "torchvision::nms" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
    _torchvision_stand_ins()
    return action()


def prepare_transformers() -> None:
    """Import the part of Transformers that imports torchvision; a missing library is reported where it is needed."""
    with contextlib.suppress(ImportError):
        with_torchvision(lambda: importlib.import_module("transformers.image_utils"))


@functools.cache  # the operators exist as long as the Library object
def _torchvision_stand_ins() -> torch.library.Library:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for operator in ("nms", "qnms"):
        library.define(operator + schema)
    return library


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_example(shapes: Sequence[tuple[int, ...]], batch: int, dtype: str | None) -> Any:
    """Inputs of these shapes with a batch axis in front: random values, or zeros for integer types (a valid index anywhere)."""
    import torch

    kind, generator = _torch_dtype(dtype or "float32"), torch.Generator().manual_seed(0)
    tensors = tuple(
        torch.randn(batch, *shape, generator=generator).to(kind)
        if kind.is_floating_point
        else torch.zeros(batch, *shape, dtype=kind)
        for shape in shapes
    )
    return tensors[0] if len(tensors) == 1 else tensors


def _converted(example: Any, dtype: torch.dtype) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, example)
