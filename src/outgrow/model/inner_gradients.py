"""Models that differentiate inside their own forward pass: energies whose forces are −∂E/∂x, physics-informed losses.

The result of `torch.autograd.grad` depends only on the function that it differentiates. A growth that preserves E(x) for every
x preserves ∂E/∂x too, so the backward operators need no rules. In a trace, a call of `grad` is one operator; the operators that
autograd runs inside it are left out. This takes a `TorchFunctionMode`, which is slow: it is used only for models that need it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GRADIENT = "outgrow.gradient"  # name of a call of `torch.autograd.grad` in a trace
Differentiated = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


def inside_backward() -> bool:
    """Whether autograd is running an operator of a backward pass."""
    return torch._C._current_autograd_node() is not None


class Gradients(TorchFunctionMode):
    """Reports each call of `torch.autograd.grad`: its outputs, the inputs that have a gradient, and their gradients."""

    def __init__(self, report: Differentiated, hidden: Callable[[bool], None]) -> None:
        super().__init__()
        self.report, self.hidden = report, hidden

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        named = {**dict(zip(("outputs", "inputs"), args, strict=False)), **(kwargs or {})}
        outputs, inputs = (_listed(named[name]) for name in ("outputs", "inputs"))
        self.hidden(True)
        try:
            results = func(*args, **(kwargs or {}))
        finally:
            self.hidden(False)
        pairs = [(given, result) for given, result in zip(inputs, results, strict=True) if result is not None]
        self.report(outputs, [given for given, _ in pairs], [result for _, result in pairs])
        return results


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def needs_gradients(error: BaseException) -> bool:
    """Whether a pass failed because it differentiates, and gradients were disabled."""
    return "does not require grad" in str(error)


@contextlib.contextmanager
def with_gradients(mode: Gradients, saved: set[int]) -> Iterator[None]:
    """Run a model with gradients on; the ids of the tensors that autograd keeps for backward passes are added to `saved`."""

    def keep(tensor: Tensor) -> Tensor:
        saved.add(id(tensor))
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mode:
        yield
