"""Run a model on meta tensors, which have shapes but no values and take no memory.

Most facts that a growth needs (which modules run, on which shapes, whether the code accepts one more block) do not depend on
values. On meta tensors a forward pass costs only the model's Python code. Code that reads values, or that uses tensors not
registered with a module, fails there: callers then fall back to the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.model.example import Example
from outgrow.model.meta_operators import ShapeCache
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.sandbox import on_meta, substituted, tensors_of


@contextmanager
def tensors_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace the model's parameters and buffers by meta tensors inside the context."""
    meta = {name: _on_meta(tensor) for name, tensor in tensors_of(model).items()}
    with substituted(model, meta), CachedShapes():
        yield


class CachedShapes(TorchDispatchMode):
    """Caches the results of operators on meta tensors, across passes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled in the meantime (see `Watcher`)."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = ShapeCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.shapes.call(func, args, kwargs or {})


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    without = tensor.detach().to("meta")
    return nn.Parameter(without, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else without


def calls_without_values(model: nn.Module, example: Example, paths: Sequence[str]) -> dict[str, list[Call]]:
    """Like `calls_of`, but on meta tensors if the model runs on them: for callers that need only shapes."""
    try:
        with tensors_on_meta(model):
            return calls_of(model, on_meta(example), paths)
    except Exception:
        return calls_of(model, example, paths)


def has_values(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in tensors_of(model).values())
