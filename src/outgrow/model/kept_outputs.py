"""Which outputs of a model a growth has to preserve: all of them, or only those that a request names.

A model may return hidden states next to its logits. If they had to be preserved, the stream that they are could not grow.
`Widen(…, outputs="logits")` names the outputs that matter; all others may change their size and are not compared. An output is
named by the key or attribute under which the model returns it, by its position in a tuple, or by a path of both
("text_model_output.pooler_output").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from outgrow.errors import SelectionError
from outgrow.model.example import outputs_in

Name = str | int
_KEPT: ContextVar[tuple[Name, ...]] = ContextVar("kept_outputs", default=())


@contextmanager
def keeping(names: Sequence[Name]) -> Iterator[None]:
    """A context in which only the named outputs of a model are preserved and compared; all of them if there are no names."""
    token = _KEPT.set(tuple(names))
    try:
        yield
    finally:
        _KEPT.reset(token)


def model_outputs(tree: Any) -> list[Tensor]:
    """The tensors in a model's output that have to be preserved.

    Example:
        >>> import torch
        >>> output = {"logits": torch.zeros(1, 2), "states": torch.zeros(1, 9)}
        >>> with keeping(["logits"]):
        ...     [tuple(tensor.shape) for tensor in model_outputs(output)]
        [(1, 2)]
    """
    names = _KEPT.get()
    return outputs_in([_found(tree, name) for name in names] if names else tree)


def other_outputs(tree: Any) -> dict[str, list[Tensor]]:
    """The tensors in a model's output that may change, by the names of the outputs; none if all have to be preserved."""
    if not _KEPT.get():
        return {}
    kept = {id(tensor) for tensor in model_outputs(tree)}
    parts = {str(name): outputs_in(part) for name, part in _parts(tree).items()}
    others = {name: [tensor for tensor in tensors if id(tensor) not in kept] for name, tensors in parts.items()}
    return {name: tensors for name, tensors in others.items() if tensors}


def _found(tree: Any, name: Name) -> Any:
    """The part of an output with a name; SelectionError with the names that there are."""
    part = tree
    for step in [name] if isinstance(name, int) else name.split("."):
        parts = {str(key): value for key, value in _parts(part).items()}
        if str(step) not in parts:
            there = ", ".join(map(repr, parts)) or f"a {type(part).__name__} without parts"
            raise SelectionError(f"outputs={name!r}: the model returns no such output; there are {there}")
        part = parts[str(step)]
    return part


def _parts(tree: Any) -> Mapping[Any, Any]:
    """The parts of an output by key, attribute or position; parts that are None are left out."""
    if isinstance(tree, Tensor):
        return {}
    if isinstance(tree, Mapping):
        found = dict(tree)
    elif hasattr(tree, "_asdict"):  # a named tuple
        found = dict(tree._asdict())
    elif isinstance(tree, (tuple, list)):
        found = dict(enumerate(tree))
    else:
        found = dict(getattr(tree, "__dict__", {}))
    return {key: value for key, value in found.items() if value is not None}
