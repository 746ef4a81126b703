"""A model's shadow: the same modules on meta tensors, which have shapes but no values and take no memory.

Most of what a growth has to find out (which modules run, on which shapes, whether the code bears one block more) does not
depend on values. In the shadow a forward pass costs the model's Python alone. Code that reads values, or that keeps tensors
which no module registers, does not run there: callers then fall back to the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outgrow.model.example import Example
from outgrow.model.meta_operators import Shapes
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.sandbox import on_meta, substituted, tensors_of


@contextmanager
def shadow(model: nn.Module) -> Iterator[None]:
    """For a while, the model's parameters and buffers are on the meta device."""
    shadows = {name: _shadow(tensor) for name, tensor in tensors_of(model).items()}
    with substituted(model, shadows), Remembered():
        yield


class Remembered(TorchDispatchMode):
    """Operators on meta tensors are worked out once, whatever pass they are in."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled meanwhile (see `Watcher`)."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = Shapes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.shapes.call(func, args, kwargs or {})


def _shadow(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    without = tensor.detach().to("meta")
    return nn.Parameter(without, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else without


def calls_without_values(model: nn.Module, example: Example, paths: Sequence[str]) -> dict[str, list[Call]]:
    """Like `calls_of`, on meta tensors if the model runs on them: shapes alone are of interest."""
    try:
        with shadow(model):
            return calls_of(model, on_meta(example), paths)
    except Exception:
        return calls_of(model, example, paths)


def has_values(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in tensors_of(model).values())
