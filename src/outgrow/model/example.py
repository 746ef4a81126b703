"""Examples: run a model on one, and find the tensors in its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.model.inner_gradients import needs_gradients

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def call(model: nn.Module, example: Example) -> Any:
    """Run the model on an example: a tensor, a tuple of arguments, or a dict of keyword arguments.

    If gradients are disabled and the model differentiates in its forward pass, it runs again with gradients.
    """
    try:
        return _called(model, example)
    except RuntimeError as error:
        if torch.is_grad_enabled() or not needs_gradients(error):
            raise
    with torch.enable_grad():
        return _called(model, example)


def _called(model: nn.Module, example: Example) -> Any:
    if isinstance(example, Mapping):
        return model(**example)
    if isinstance(example, (tuple, list)):
        return model(*example)
    return model(example)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order; other objects (e.g. caches) are ignored."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        tree = [getattr(tree, name) for name in tree.__dataclass_fields__]
    if isinstance(tree, (tuple, list)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def describe_example(example: Any) -> str:
    """Shapes and types of an example.

    Example:
        >>> describe_example({"x": torch.zeros(2, 3), "flag": True})
        'x=(2, 3) float32, flag=True'
    """
    if isinstance(example, Tensor):
        return f"{tuple(example.shape)} {str(example.dtype).removeprefix('torch.')}"
    if isinstance(example, Mapping):
        return ", ".join(f"{key}={describe_example(value)}" for key, value in example.items()) or "an empty dict"
    if isinstance(example, (tuple, list)):
        return ", ".join(map(describe_example, example)) or f"an empty {type(example).__name__}"
    return repr(example) if isinstance(example, (bool, int, float, str, type(None))) else f"of type {type(example).__name__}"


def outputs_in(tree: Any) -> list[Tensor]:
    """The tensors in a model's output, in objects of any kind except for caches."""
    return tensors_anywhere(tree, set(), caches=False)


def is_cache(thing: Any) -> bool:
    """Whether an object stores keys and values for later passes, as Transformers' caches do."""
    return any(kind.__name__.endswith("Cache") for kind in type(thing).__mro__)


def tensors_anywhere(tree: Any, seen: set[int], caches: bool) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if id(tree) in seen or isinstance(tree, (nn.Module, type, FunctionType, ModuleType)):
        return []
    seen.add(id(tree))
    if is_cache(tree) and not caches:
        return []
    if isinstance(tree, Mapping):
        parts = list(tree.values())
    elif isinstance(tree, (tuple, list, set, frozenset)):
        parts = list(tree)
    else:
        parts = list(getattr(tree, "__dict__", {}).values())
    return [tensor for part in parts for tensor in tensors_anywhere(part, seen, caches)]
