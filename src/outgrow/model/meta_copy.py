"""Run a model on meta tensors, which have shapes but no values and take no memory.

Most facts that a growth needs (which modules run, on which shapes, whether the code accepts one more block) do not depend on
values. On meta tensors a forward pass costs only the model's Python code. Code that reads integers and masks runs there if
their values are known (see `model/known_values.py`). Code that reads other values, or that uses tensors not registered with a
module, fails there: callers then fall back to the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from outgrow.model.example import Example
from outgrow.model.known_values import KnownConstants, KnownShapes, on_meta
from outgrow.model.meta_operators import ShapeCache
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.sandbox import substituted, tensors_of


@contextmanager
def tensors_on_meta(model: nn.Module, known: bool = False) -> Iterator[None]:
    """Replace the model's parameters and buffers by meta tensors inside the context.

    known: whether integers and masks keep their values (see `model/known_values.py`).
    """
    meta = {name: _on_meta(tensor) for name, tensor in tensors_of(model).items()}
    with substituted(model, meta), CachedShapes(known):
        yield


def inside_known() -> bool:
    """Whether integers and masks keep their values here, since this runs in `tensors_on_meta(…, known=True)`."""
    return any(isinstance(mode, CachedShapes) and mode.known for mode in _get_current_dispatch_mode_stack())


class CachedShapes(TorchDispatchMode):
    """Caches the results of operators on meta tensors, across passes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled in the meantime (see `Watcher`)."""
        return False

    def __init__(self, known: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.shapes, self.constants = KnownShapes() if known else ShapeCache(), KnownConstants()

    def __enter__(self) -> CachedShapes:
        if self.known:
            self.constants.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self.known:
            self.constants.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.shapes.call(func, args, kwargs or {})


def _on_meta(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    without = tensor.detach().to("meta")
    return nn.Parameter(without, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else without


def calls_without_values(model: nn.Module, example: Example, paths: Sequence[str]) -> dict[str, list[Call]]:
    """Like `calls_of`, but on meta tensors if the model runs on them: for callers that need only shapes."""
    for known in (False, True):
        with suppress(Exception), tensors_on_meta(model, known):
            return calls_of(model, on_meta(example), paths)
    return calls_of(model, example, paths)


def has_values(model: nn.Module) -> bool:
    return not any(tensor.is_meta for tensor in tensors_of(model).values())
