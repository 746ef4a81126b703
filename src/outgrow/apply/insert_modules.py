"""Insert new modules into a model's containers.

In a container that numbers its children (`nn.Sequential`, `nn.ModuleList`), the children behind the new one move up by one
number; the plan records how every name changes. A history can be replayed on a freshly built model: the new child is a copy of
a sibling, or is built from the plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from outgrow.apply.weight_fades import without_drifts
from outgrow.growth_plan.plan import Insert, Setting
from outgrow.history.growths_on_model import ATTRIBUTE as HISTORY
from outgrow.model.copy_block import copy_of_block
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.modules.blocks import Parallel, build
from outgrow.modules.gates import without_gates

CONTAINERS = (nn.Sequential, nn.ModuleList)
INDEX_NAMES = ("layer_idx", "layer_id", "layer_index")  # attributes in which a block keeps its index in the stack


def numbering(container: nn.Module) -> tuple[str, int] | None:
    """The prefix and the first number of consecutively numbered children; None if their names are not of this form."""
    found = [re.fullmatch(r"(.*?)(\d+)", key) for key in container._modules]
    matches = [match for match in found if match is not None]
    if not matches or len(matches) < len(found):
        return None
    prefix, first = matches[0].group(1), int(matches[0].group(2))
    return (prefix, first) if list(container._modules) == [f"{prefix}{first + i}" for i in range(len(matches))] else None


def apply_insert(model: nn.Module, insert: Insert, journal: Journal, shared: bool = False) -> nn.Module:
    """Put a copy of a sibling, or a newly built module, into a container; returns the new module.

    shared: the copy holds the sibling's own tensors, for a trial that only runs the model.
    """
    if insert.wraps:
        wrap(model, insert.container, journal, insert.beside)
    container = model.get_submodule(insert.container)
    before = dict(container._modules)
    keys, modules = list(before), list(before.values())
    if insert.made:
        like = next(p for p in (*container.parameters(), *model.parameters()) if p.is_floating_point())
        new = build(dict(insert.made), like)
    else:
        source = modules[insert.copy_of]
        assert source is not None
        new = copy_of_block(source, model, shared)
        without_gates(new)
        without_drifts(new)
    for module in new.modules():
        vars(module).pop(HISTORY, None)  # the copy has the source's shapes already
    new.train(container.training)
    modules.insert(insert.at, new)
    keys.insert(insert.at, insert.key)
    if insert.prefix is not None:
        keys = [f"{insert.prefix}{insert.first + index}" for index in range(len(modules))]
    _put_children(container, dict(zip(keys, modules, strict=True)), journal)
    return new


def like_of(model: nn.Module, insert: Insert) -> str:
    """The path of the module whose optimizers get a new module's parameters: its source, or the module before or beside it."""
    keys = list(model.get_submodule(insert.container)._modules)
    if insert.beside:
        index = 0
    elif insert.made:
        index = insert.at - 1
    else:
        index = insert.copy_of + (insert.copy_of >= insert.at)
    return f"{insert.container}.{keys[index]}" if insert.container else keys[index]


def wrap(model: nn.Module, path: str, journal: Journal, beside: bool = False) -> None:
    """Replace a module by an nn.Sequential that contains it, or by a Parallel if another module will run beside it."""
    parent = model.get_submodule(path.rpartition(".")[0])
    module = model.get_submodule(path)
    wrapped = Parallel(module) if beside else nn.Sequential(module)
    wrapped.training = module.training
    _put_children(parent, {**parent._modules, path.rpartition(".")[2]: wrapped}, journal)


def _put_children(container: nn.Module, children: Mapping[str, nn.Module | None], journal: Journal) -> None:
    before = dict(container._modules)

    def put(children: Mapping[str, nn.Module | None]) -> None:
        container._modules.clear()
        container._modules.update(children)

    journal.note(lambda: put(before))
    put(children)


def signature(block: nn.Module, counted: Collection[tuple[str, str]]) -> tuple[Any, ...]:
    """Classes, parameter shapes and settings of a block's modules: blocks of a container with equal signatures are alike.

    counted: attributes that hold the block's index in the container; these are left out.
    """
    return tuple(
        (
            path,
            type(module),
            tuple((name, tuple(p.shape)) for name, p in module.named_parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in sorted(vars(module).items())
                if _is_setting(name, value) and (path, name) not in counted
            ),
        )
        for path, module in block.named_modules()
    )


def _is_setting(name: str, value: Any) -> bool:
    """Whether blocks that differ in an attribute differ in kind: int, tuple, str, bool, function; not float (dropout rates)."""
    if type(value) is bool or isinstance(value, (FunctionType, BuiltinFunctionType)):
        return name != "training" and not name.startswith("_")
    return type(value) in (int, tuple, str)


def counters(container: nn.Module) -> list[tuple[str, str]]:
    """Attributes in which the children keep their own index in the container: (path within the child, name).

    Blocks of another kind may lack some (`attention.layer_idx` in a stack of attention and recurrent blocks).
    """
    holders: dict[tuple[str, str], list[bool]] = {}  # for each child that has the attribute, whether it is the child's index
    for index, child in enumerate(container.children()):
        for path, module in child.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    holders.setdefault((path, name), []).append(value == index)
    return [key for key, right in holders.items() if all(right) and (len(right) > 1 or key[1] in INDEX_NAMES)]


def _value(child: nn.Module, path: str, name: str) -> Any:
    try:
        return vars(child.get_submodule(path)).get(name)
    except AttributeError:
        return None


def renumbering(model: nn.Module, container_path: str, counted: Sequence[tuple[str, str]]) -> list[Setting]:
    """Settings that correct the index that each child keeps of itself."""
    settings = []
    prefix = f"{container_path}." if container_path else ""
    for index, (key, child) in enumerate(model.get_submodule(container_path).named_children()):
        for path, name in counted:
            old = _value(child, path, name)
            if old is not None and old != index:
                settings.append(Setting(joined_path(f"{prefix}{key}", path), name, old, index))
    return settings


@torch.no_grad()
def draw_parameters(block: nn.Module, seed: int) -> None:
    """Draw new values for all layers of a block that have `reset_parameters`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in block.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
