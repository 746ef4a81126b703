"""Deepen a stack to a given number of blocks, by copies of its own.

    interleave   a b c → a a b b c c    copies follow their source; fewer copies than blocks are spread evenly
    stack        a b c → a b c a b c    copies follow the last block, in the order of the blocks

If p kinds of blocks alternate, p blocks in a row are copied as one, so that the kinds keep alternating.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outgrow.errors import MethodError, Problem, SelectionError, SizeError
from outgrow.exactness.zero_output import NotZero
from outgrow.model.example import Example, outputs_in
from outgrow.model.meta_copy import calls_without_values
from outgrow.model.module_calls import Call
from outgrow.model.module_paths import joined_path
from outgrow.requests import Deepen
from outgrow.transforms.deepen.own_kind import SiblingKinds, Template, block_calls, containers, put_copies, template_for
from outgrow.transforms.site_and_step import Site, Step


def stack_plans(site: Site, request: Deepen) -> Step:
    """The plans that deepen a stack, with the starting values of the new blocks."""
    model, example, layers = site.model, site.example, request.layers or 0
    path = _stack(model, example, request)
    names = [joined_path(path, name) for name in model.get_submodule(path)._modules]
    if layers <= len(names):
        raise SizeError(f"{path or 'the model'} has {len(names)} blocks already: layers={layers} would not deepen it")
    found = block_calls(model, example, path)
    kinds = SiblingKinds()
    try:
        copies: list[tuple[int, Template]] = []
        for place, source in _copies(request.order, len(names), layers, _period(kinds, model, path, found, names)):
            behind = Deepen(names[place], method=request.method, fade=request.fade)
            step = sum(other == place for other, _ in copies)
            copies.append((place, template_for(model, found, behind, step, kinds, preferred=source)))
        with site.trial() as journal:
            return Step(put_copies(model, example, path, copies, found, request, site.seed, journal))
    except NotZero as reason:
        way_out = "outgrow.places(model, example) lists the places where a block can be added, and the exact methods there"
        if request.fade is None:
            way_out += "; with fade= copies of blocks fade in, which is exact in more models"
        raise MethodError("the stack can't be deepened", [Problem(path or "the model", str(reason), way_out)]) from reason


def _copies(order: str, blocks: int, layers: int, period: int) -> list[tuple[int, int]]:
    """For each copy, the index of the block that it follows, ascending, and the index of its source."""
    more = layers - blocks
    if order == "stack":
        return [(blocks - 1, copy % blocks) for copy in range(more)]
    groups, rounds = blocks // period, more // period
    result = []
    for group in range(groups):
        times = (group + 1) * rounds // groups - group * rounds // groups
        members = range(group * period, (group + 1) * period)
        result += [(members[-1], source) for _ in range(times) for source in members]
    return result + [(blocks - 1, blocks - period + copy % period) for copy in range(more % period)]


def _period(kinds: SiblingKinds, model: nn.Module, path: str, found: dict[str, list[Call]], names: Sequence[str]) -> int:
    """After how many blocks their kinds repeat; 1 if they do not repeat, or only as a whole."""
    shapes = [_shapes(found[name][0].output) for name in names if found[name]]
    period = kinds.pattern(path, model.get_submodule(path), found, shapes[-1])[0] if shapes else None
    return period if period is not None and period < len(names) else 1


def _stack(model: nn.Module, example: Example, request: Deepen) -> str:
    """The path of the stack that a request names, or of the only one."""
    holders = dict(containers(model))
    if request.stack is not None:
        if request.stack in holders:
            return request.stack
        listed = ", ".join(map(repr, _stacks(model, example))) or "none"
        raise SelectionError(f"stack={request.stack!r} is no container of blocks; stacks of this model: {listed}")
    found = _stacks(model, example)
    if len(found) == 1:
        return found[0]
    if not found:
        raise SelectionError("the model has no stack of equal blocks: name a place with after=, as outgrow.places lists them")
    listed = ", ".join(f"stack={path!r} ({len(holders[path]._modules)} blocks)" for path in found)
    raise SelectionError(f"the model has {len(found)} stacks: choose one of {listed}")


def _stacks(model: nn.Module, example: Example) -> list[str]:
    """Paths of the outermost containers whose children are of one class and keep the shape of what they are given."""
    holders = [(path, module) for path, module in containers(model) if len({type(child) for child in module.children()}) == 1]
    children = {path: [joined_path(path, name) for name in module._modules] for path, module in holders}
    found = calls_without_values(model, example, [name for names in children.values() for name in names])
    stacks: list[str] = []
    for path, module in holders:
        blocks = all(child._modules for child in module.children())
        calls = [found[name] for name in children[path]]
        inner = any(path.startswith(f"{name}.") for outer in stacks for name in children[outer])
        if blocks and not inner and all(len(one) == 1 for one in calls) and any(_keeps_shape(one[0]) for one in calls):
            stacks.append(path)
    several = [path for path in stacks if len(children[path]) > 1]
    return several or stacks


def _keeps_shape(call: Call) -> bool:
    return _shapes(call.output) == _shapes(call.example) != []


def _shapes(output: object) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in outputs_in(output)][:1]
