"""Walk over the modules of a model, find one by its path, and set their mode, in less time than torch's methods take.

`nn.Module.named_modules` passes each module through one generator per level, and `nn.Module.train` calls a method per module.
Analyses do that for hundreds of trial passes. Where a class changes one of these methods, torch's own are called.
"""

from __future__ import annotations

from torch import nn


def all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same as `list(model.named_modules())`.

    Example:
        >>> [path for path, _ in all_modules(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())))]
        ['', '0', '1', '1.0']
    """
    found = _registered(model)
    return list(model.named_modules()) if any(_lists_modules_itself(module) for _, module in found) else found


def _registered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, with its first path."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        seen.add(module)
        found.append((path, module))
        prefix = f"{path}." if path else ""
        for name, child in module._modules.items():
            if child is not None and child not in seen:
                visit(prefix + name, child)

    visit("", model)
    return found


def _lists_modules_itself(module: nn.Module) -> bool:
    return type(module).named_modules is not nn.Module.named_modules


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The same as `model.get_submodule(path)`."""
    module: nn.Module | None = model
    for name in path.split(".") if path else ():
        if module is None or type(module).get_submodule is not nn.Module.get_submodule:
            return model.get_submodule(path)
        module = module._modules.get(name)
    return model.get_submodule(path) if module is None else module


def set_mode(model: nn.Module, training: bool) -> None:
    """The same as `model.train(training)`."""
    modules = [module for _, module in _registered(model)]
    if any(_changes_modes(module) for module in modules):
        model.train(training)
        return
    for module in modules:
        if module.training is not training:
            module.training = training


def _changes_modes(module: nn.Module) -> bool:
    """Whether setting the mode of a module may do more than set a flag."""
    kind = type(module)
    return kind.train is not nn.Module.train or kind.children is not nn.Module.children or "train" in vars(module)
