"""Modules that do not run on the example although similar modules next to them do, e.g. experts that receive no token.

Growth follows the operators of a forward pass, so it would skip such an *idle* module, and the model would fail on data that
uses it. It is therefore traced next to a *peer* that runs, of the same parent, class and shapes: instead of y = f(x), the trace
contains y + 0·g(x) for each idle peer g of f. So g is analysed, grown and adapted like f, and the outputs stay the same. For
the check of a growth, g replaces f.

An idle module without a running peer is reported. A volume that it may use (it has an axis of the same size, and the volume
reaches its parent) can't grow, since nothing shows how the two are related.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

IdlePeers = Mapping[str, Sequence[str]]  # path of a module that ran → paths of its idle peers
NO_PEERS: IdlePeers = {}
NOTE = "not run on the example"
SHOWN = 8


def idle_peers(model: nn.Module, unused: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The idle peers of modules that ran; unused: names of parameters that no operator has used."""
    idle = idle_modules(model, unused)
    found: dict[str, tuple[str, ...]] = {}
    for path in idle:
        parent = model.get_submodule(path.rpartition(".")[0])
        outer = path.rpartition(".")[0]
        for key, other in _beside(parent):
            name = f"{outer}.{key}" if outer else key
            if name not in idle and _kind(other) == _kind(model.get_submodule(path)):
                found[name] = (*found.get(name, ()), path)
                break
    return found


def _beside(parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, and those in a dict of modules, such as PEFT's trained copies of an original module."""
    for key, child in parent.named_children():
        yield key, child
        if isinstance(child, nn.ModuleDict):
            yield from ((f"{key}.{name}", one) for name, one in child.items())


def idle_modules(model: nn.Module, unused: Collection[str]) -> list[str]:
    """The outermost modules without a used parameter."""
    held: dict[str, list[str]] = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        for length in range(1, len(parts) + 1):
            held.setdefault(".".join(parts[:length]), []).append(name)
    idle = [path for path, names in held.items() if all(name in unused for name in names)]
    return [path for path in idle if not any(path.startswith(f"{outer}.") for outer in idle)]


def _kind(module: nn.Module) -> Any:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    return type(module), tuple(shapes) if shapes else id(module)


@contextlib.contextmanager
def peers_alongside(model: nn.Module, pairs: IdlePeers) -> Iterator[None]:
    """Run idle peers after the modules that they belong to, without an effect on the outputs."""

    def hook_for(others: Sequence[nn.Module]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            for other in others:
                output = _merged(output, other(*args, **kwargs))
            return output

        return hook

    handles = [
        model.get_submodule(path).register_forward_hook(
            hook_for([model.get_submodule(name) for name in names]), with_kwargs=True
        )
        for path, names in pairs.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _merged(output: Any, other: Any) -> Any:
    """y + 0·z for outputs y and z of the same structure."""
    (ours, form), (theirs, _) = tree_flatten(output), tree_flatten(other)
    return tree_unflatten([_sum(y, z) for y, z in zip(ours, theirs, strict=True)], form)


def _sum(y: Any, z: Any) -> Any:
    fits = isinstance(y, Tensor) and isinstance(z, Tensor) and y.is_floating_point() and y.shape == z.shape
    return y + z * 0.0 if fits else y


@contextlib.contextmanager
def peers_in_place(model: nn.Module, pairs: IdlePeers, index: int) -> Iterator[None]:
    """Replace each module that ran by its idle peer with this index (or its last one)."""
    replaced = [(vars(model.get_submodule(path)), names[min(index, len(names) - 1)]) for path, names in pairs.items()]
    before = [attributes.get("forward") for attributes, _ in replaced]
    for attributes, name in replaced:
        attributes["forward"] = model.get_submodule(name).__call__
    try:
        yield
    finally:
        for (attributes, _), forward in zip(replaced, before, strict=True):
            attributes.pop("forward")
            attributes.update({} if forward is None else {"forward": forward})


def note(model: nn.Module, unused: Collection[str], pairs: IdlePeers) -> list[str]:
    """Report lines on idle modules, and on unused parameters of modules that ran."""
    grown = [name for names in pairs.values() for name in names]
    idle = idle_modules(model, unused)
    alone = [name for name in unused if not any(name.startswith(f"{path}.") for path in idle)]
    left = [*(path for path in idle if path not in grown), *alone]
    reason = f"assumed to be used like {_listed(list(pairs))}, and grown in the same way"
    notes = [f"{NOTE}: {_listed(grown)}; {reason}"] if grown else []
    return [*notes, *([f"{NOTE}: {_listed(left)}; left unchanged"] if left else [])]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
