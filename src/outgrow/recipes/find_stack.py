"""Find the stack of blocks that a recipe deepens, from the model's modules alone: no example is needed."""

from __future__ import annotations

from torch import nn

from outgrow.errors import Problem, SelectionError
from outgrow.model.check_arguments import check_module
from outgrow.model.unwrap import bare
from outgrow.text.plurals import counted
from outgrow.transforms.deepen.own_kind import containers


def find_stack(model: nn.Module, layers: int, stack: str | None) -> str | None:
    """The path of the stack with this number of blocks; None if it is the model itself.

    stack: the path, if the user names it.
    """
    check_module(model := bare(model), values=False)
    found = stacks_in(model)
    if stack is not None:
        named = stacks_in(model, inner=True)  # stages of a Swin are a stack of stacks
        if named.get(stack) == layers:
            return stack or None
        reason = f"it has {counted(named[stack], 'block')}" if stack in named else "it is no stack of blocks of one class"
        raise SelectionError(f"stages begin with {counted(layers, 'block')}", [Problem(stack, reason, _listed(found))])
    fitting = [path for path, count in found.items() if count == layers]
    if len(fitting) == 1:
        return fitting[0] or None
    if fitting:
        choices = " or ".join(f"stack={path!r}" for path in fitting)
        raise SelectionError(f"the model has {len(fitting)} stacks of {counted(layers, 'block')}: write {choices}")
    inner = stacks_in(model, inner=True)
    if layers in inner.values():
        choices = " or ".join(f"stack={path!r}" for path, count in inner.items() if count == layers)
        raise SelectionError(f"the model has stacks of {counted(layers, 'block')} only inside of another one: write {choices}")
    raise SelectionError(f"the model has no stack of {counted(layers, 'block')}: {_listed(found)}")


def stacks_in(model: nn.Module, inner: bool = False) -> dict[str, int]:
    """The number of blocks of each container whose children are modules of one class with parts of their own.

    inner: also of containers inside of another one.
    """
    found: dict[str, int] = {}
    for path, module in containers(model):
        children = list(module.children())
        inside = any(path.startswith(f"{outer}." if outer else "") and path != outer for outer in found)
        if (
            (inner or not inside)
            and len({type(child) for child in children}) == 1
            and all(child._modules for child in children)
        ):
            found[path] = len(module._modules)
    return found


def _listed(found: dict[str, int]) -> str:
    listed = ", ".join(f"{path or 'the model itself'} ({counted(count, 'block')})" for path, count in found.items())
    return f"stages begin with the number of blocks that the model has now; its stacks: {listed or 'none'}"
