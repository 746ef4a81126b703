"""Hooks on gradient accumulators follow a parameter whose tensor is replaced.

The gradient of a leaf is summed up by a node of its own (`AccumulateGrad`), made for one shape: `set_` gives a parameter a new
one. Hooks of the tensor (`register_hook`, `register_post_accumulate_grad_hook`) stay with the tensor. Hooks of the node
(`register_hook`, `register_prehook`, as FSDP and DeepSpeed use them) would be lost without a sign. Here the new node runs the
hooks of the old one, as long as their handles have not removed them. It lives as long as the old one, which lives as long as
somebody holds it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

KEPT = "outgrow: the node that runs these hooks now"
ALONE = 2  # references to an object that only a local name holds: that name, and the argument of the count


@contextlib.contextmanager
def hooks_kept(parameter: Tensor) -> Iterator[None]:
    """Replace a parameter's tensor within: hooks on its accumulator go on.

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
    if old is None or sys.getrefcount(old) <= ALONE:  # a node that nobody holds has no hooks: with it, they are gone
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
        old.metadata[KEPT] = new


class _Before:
    """All hooks that run before a node, as one; each may replace the gradients."""

    def __init__(self, hooks: Mapping[int, Any]) -> None:
        self.hooks = hooks

    def __call__(self, gradients: Any) -> Any:
        for hook in list(self.hooks.values()):
            replaced = hook(gradients)
            gradients = gradients if replaced is None else replaced
        return gradients


class _After:
    """All hooks that run after a node, as one."""

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
    """The hooks that are registered: torch gives the dict that holds them with the handle of another one."""
    handle = register(lambda *given: None)
    hooks: Mapping[int, Any] = handle.hooks_dict_ref()
    handle.remove()
    return hooks
