"""Find the stack of blocks that a recipe deepens, from the model's modules alone: no example is needed."""

from __future__ import annotations

from torch import nn

from outgrow.errors import Problem, SelectionError
from outgrow.model.unwrap import bare
from outgrow.text.plurals import counted
from outgrow.transforms.deepen.own_kind import containers


def find_stack(model: nn.Module, layers: int, stack: str | None) -> str | None:
    """The path of the stack with this number of blocks; None if it is the model itself.

    stack: the path, if the user names it.
    """
    found = stacks_in(bare(model))
    if stack is not None:
        if found.get(stack) == layers:
            return stack
        reason = f"it has {counted(found[stack], 'block')}" if stack in found else "it is no stack of blocks of one class"
        raise SelectionError(f"stages begin with {counted(layers, 'block')}", [Problem(stack, reason, _listed(found))])
    fitting = [path for path, count in found.items() if count == layers]
    if len(fitting) == 1:
        return fitting[0] or None
    if fitting:
        choices = " or ".join(f"stack={path!r}" for path in fitting)
        raise SelectionError(f"the model has {len(fitting)} stacks of {counted(layers, 'block')}: write {choices}")
    raise SelectionError(f"the model has no stack of {counted(layers, 'block')}: {_listed(found)}")


def stacks_in(model: nn.Module) -> dict[str, int]:
    """The number of blocks of each outermost container whose children are modules of one class with parts of their own."""
    found: dict[str, int] = {}
    for path, module in containers(model):
        children = list(module.children())
        inside = any(path.startswith(f"{outer}." if outer else "") and path != outer for outer in found)
        if not inside and len({type(child) for child in children}) == 1 and all(child._modules for child in children):
            found[path] = len(module._modules)
    return found


def _listed(found: dict[str, int]) -> str:
    listed = ", ".join(f"{path or 'the model itself'} ({counted(count, 'block')})" for path, count in found.items())
    return f"stages begin with the number of blocks that the model has now; its stacks: {listed or 'none'}"
