"""Modules that the example does not run, where others like them run beside them: experts that no token of it meets.

Growth follows the operators of a forward pass, so it would leave such a module as it is, and the model would fail on data that
meets it. It is therefore watched in the place of a module that ran: beside y = f(x), the trace holds y + 0·g(x) for each g of
f's kind and parent that did not run. So g is read, grown and fitted as f is, and nothing is computed differently. For the check
of a growth g takes f's place altogether.

What did not run and has no like that did is reported. A volume that may be its own too (it has an axis of the same size, and is
where the volume is passed on) can't grow: nothing shows how the two belong together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Understudies = Mapping[str, Sequence[str]]  # path of a module that ran → those of its kind beside it that did not
NOBODY: Understudies = {}
NOTE = "not run on the example"
SHOWN = 8


def understudies(model: nn.Module, unused: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Who can be watched in whose place; unused: names of parameters that no operator has used."""
    idle = idle_modules(model, unused)
    found: dict[str, tuple[str, ...]] = {}
    for path in idle:
        parent = model.get_submodule(path.rpartition(".")[0])
        outer = path.rpartition(".")[0]
        for key, other in parent._modules.items():
            name = f"{outer}.{key}" if outer else key
            if other is not None and name not in idle and _kind(other) == _kind(model.get_submodule(path)):
                found[name] = (*found.get(name, ()), path)
                break
    return found


def idle_modules(model: nn.Module, unused: Collection[str]) -> list[str]:
    """The outermost modules of which no parameter was used."""
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
def standing_in(model: nn.Module, pairs: Understudies) -> Iterator[None]:
    """Let understudies run beside those whose place they could take, to no effect on what is computed."""

    def behind(others: Sequence[nn.Module]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            for other in others:
                output = _merged(output, other(*args, **kwargs))
            return output

        return hook

    handles = [
        model.get_submodule(path).register_forward_hook(behind([model.get_submodule(name) for name in names]), with_kwargs=True)
        for path, names in pairs.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _merged(output: Any, other: Any) -> Any:
    """Outputs y and z of one form as y + 0·z."""
    (ours, form), (theirs, _) = tree_flatten(output), tree_flatten(other)
    return tree_unflatten([_sum(y, z) for y, z in zip(ours, theirs, strict=True)], form)


def _sum(y: Any, z: Any) -> Any:
    fits = isinstance(y, Tensor) and isinstance(z, Tensor) and y.is_floating_point() and y.shape == z.shape
    return y + z * 0.0 if fits else y


@contextlib.contextmanager
def taking_over(model: nn.Module, pairs: Understudies, number: int) -> Iterator[None]:
    """Let the understudy of this number (or the last there is) do what the module that ran would do."""
    replaced = [(vars(model.get_submodule(path)), names[min(number, len(names) - 1)]) for path, names in pairs.items()]
    before = [attributes.get("forward") for attributes, _ in replaced]
    for attributes, name in replaced:
        attributes["forward"] = model.get_submodule(name).__call__
    try:
        yield
    finally:
        for (attributes, _), forward in zip(replaced, before, strict=True):
            attributes.pop("forward")
            attributes.update({} if forward is None else {"forward": forward})


def note(model: nn.Module, unused: Collection[str], pairs: Understudies) -> list[str]:
    """What to report of what did not run: names of modules, and of parameters whose module is used otherwise."""
    grown = [name for names in pairs.values() for name in names]
    idle = idle_modules(model, unused)
    alone = [name for name in unused if not any(name.startswith(f"{path}.") for path in idle)]
    left = [*(path for path in idle if path not in grown), *alone]
    notes = [f"{NOTE}: {_listed(grown)}; taken to be used as {_listed(list(pairs))}, and grown alike"] if grown else []
    return [*notes, *([f"{NOTE}: {_listed(left)}; left as it is"] if left else [])]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
