"""Keep hooks on gradient accumulators when a parameter's tensor is replaced.

A node (`AccumulateGrad`), made for one shape, accumulates the gradient of a leaf: `set_` gives a parameter a new node. Hooks of
the tensor (`register_hook`, `register_post_accumulate_grad_hook`) stay with the tensor. Hooks of the node (`register_hook`,
`register_prehook`, as FSDP and DeepSpeed use them) would be lost silently. Here the new node runs the hooks of the old one,
until their handles remove them. The new node lives as long as the old one, and that as long as there are references to it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

NEW_NODE = "outgrow: the node that runs these hooks now"
ONE_NAME = 2  # reference count of an object that only a local name holds: that name, and the argument of `getrefcount`


@contextlib.contextmanager
def hooks_kept(parameter: Tensor) -> Iterator[None]:
    """A context in which a parameter's tensor is replaced, and after which hooks on its accumulator still run.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> node = torch.autograd.graph.get_gradient_edge(weight).node
        >>> handle = node.register_hook(lambda inputs, outputs: print(outputs[0].shape))
        >>> with torch.no_grad(), hooks_kept(weight):
        ...     _ = weight.set_(torch.ones(3))
        >>> weight.sum().backward()
        torch.Size([3])
    """
    old = _node(parameter)
    if old is None or sys.getrefcount(old) <= ONE_NAME:  # a node without other references was made just now: it has no hooks
        yield
        return
    before, after = _hooks(old.register_prehook), _hooks(old.register_hook)
    yield
    if before or after:
        new: Any = _node(parameter)
        if before:
            new.register_prehook(_Before(before))
        if after:
            new.register_hook(_After(after))
        old.metadata[NEW_NODE] = new


class _Before:
    """Runs all hooks before a node; each may replace the gradients."""

    def __init__(self, hooks: Mapping[int, Any]) -> None:
        self.hooks = hooks

    def __call__(self, gradients: Any) -> Any:
        for hook in list(self.hooks.values()):
            replaced = hook(gradients)
            gradients = gradients if replaced is None else replaced
        return gradients


class _After:
    """Runs all hooks after a node."""

    def __init__(self, hooks: Mapping[int, Any]) -> None:
        self.hooks = hooks

    def __call__(self, inputs: Any, outputs: Any) -> None:
        for hook in list(self.hooks.values()):
            hook(inputs, outputs)


def _node(parameter: Tensor) -> Any:
    if not (parameter.requires_grad and parameter.is_leaf):
        return None
    with torch.enable_grad():  # as `torch.autograd.graph.get_gradient_edge` does, which takes twice as long
        view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


def _hooks(register: Any) -> Mapping[int, Any]:
    """The registered hooks: torch only gives access to their dict with the handle of a further hook."""
    handle = register(lambda *given: None)
    hooks: Mapping[int, Any] = handle.hooks_dict_ref()
    handle.remove()
    return hooks
