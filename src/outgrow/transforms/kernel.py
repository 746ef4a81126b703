"""Kernel morphing: a larger kernel with zeros around the old one, and more padding to match (Network Morphism, §3.5).

    w′ = [0 w 0] along each axis,   padding′ = padding + dilation·(k′ − k)/2

The stride does not change; a transposed convolution crops the larger output by its larger padding. An odd difference needs
padding on one side only: padding="same" provides that, and it is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from outgrow.analysis.volumes import Anatomy
from outgrow.errors import MethodError, Problem, SelectionError, SizeError
from outgrow.growth_plan.plan import Change, Insertion, Plan, Setting
from outgrow.requests import Kernel
from outgrow.text.plurals import counted
from outgrow.transforms.site_and_step import Site, Step


def kernel_plan(site: Site, request: Kernel) -> Step:
    """The edits that enlarge a kernel."""
    model, anatomy, path = site.model, site.anatomy, request.where
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        layer = None
    if not isinstance(layer, nn.modules.conv._ConvNd):
        found = [name for name, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd)]
        raise SelectionError(f"{path!r} is no convolution of the model; those are {', '.join(found[:8]) or 'none'}")
    old = tuple(layer.kernel_size)
    new = (request.size,) * len(old) if isinstance(request.size, int) else tuple(request.size)
    if len(new) != len(old) or any(b < a for a, b in zip(old, new, strict=False)) or new == old:
        raise SizeError(f"{path} has a kernel of {old}: size={request.size!r} is no larger one")
    weight = _weight(model, anatomy, layer, path)
    fronts = [_front(layer, path, axis, old[axis], new[axis]) for axis in range(len(old))]
    edits = []
    for axis, front in enumerate(fronts):
        if new[axis] > old[axis]:
            kept = range(front, front + old[axis])
            at = tuple(position for position in range(new[axis]) if position not in kept)
            edits.append(_ring(weight, 2 + axis, old[axis], at, request.fade))
    settings = [Setting(path, "kernel_size", old, new)]
    if layer.padding != "same":
        before: Any = (0,) * len(old) if layer.padding == "valid" else layer.padding
        padding = tuple(p + d * f for p, d, f in zip(before, layer.dilation, fronts, strict=True))
        settings.append(Setting(path, "padding", layer.padding, padding))
    twice = "_reversed_padding_repeated_twice"
    if twice in vars(layer):
        padded = _reversed(layer, fronts, old, new)
        _check_mirrors(layer, path, anatomy, padded)
        settings.append(Setting(path, twice, list(vars(layer)[twice]), padded))
    method = f"random, faded in over {counted(request.fade, 'step')}" if request.fade else "netmorph"
    changes = (Change(f"{path} (kernel)", old, new, method),)
    return Step((Plan(changes, tuple(edits), tuple(settings), site.seed),))


def _ring(weight: str, axis: int, size: int, at: tuple[int, ...], fade: int | None) -> Insertion:
    """The new entries around the old kernel along an axis: zeros, or drawn values that fade in."""
    if fade is None:
        return Insertion(weight, axis, size, at, (0,) * len(at), "zero")
    return Insertion(
        weight, axis, size, at, (0,) * len(at), "free", draws=tuple(range(len(at))), signs=(1.0,) * len(at), fade=fade
    )


def _reversed(layer: Any, fronts: Sequence[int], old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The amounts of `_reversed_padding_repeated_twice` for the larger kernel, last axis first."""
    before = list(layer._reversed_padding_repeated_twice)
    result = []
    for place, axis in enumerate(reversed(range(len(old)))):
        back = new[axis] - old[axis] - fronts[axis]
        result += [before[2 * place] + layer.dilation[axis] * fronts[axis], before[2 * place + 1] + layer.dilation[axis] * back]
    return result


def _check_mirrors(layer: Any, path: str, anatomy: Anatomy, padded: Sequence[int]) -> None:
    """Raise if reflect or circular padding would need more pixels than the example has."""
    spare = {"reflect": 1, "circular": 0}.get(layer.padding_mode)
    trace = anatomy.reading.trace
    for op in trace.ops if spare is not None else ():
        if op.name == "aten.convolution" and op.module == path:
            for place, size in enumerate(reversed(trace.values[op.args[0].value].shape[2:])):
                size -= sum(layer._reversed_padding_repeated_twice[2 * place : 2 * place + 2])
                needed = max(padded[2 * place : 2 * place + 2])
                if needed > size - (spare or 0):
                    mode = layer.padding_mode
                    raise SizeError(
                        f"{path} would need {needed} positions for its {mode} padding, and the example has {size} there"
                    )


def _front(layer: Any, path: str, axis: int, old: int, new: int) -> int:
    """The number of zeros before the old kernel along an axis."""
    if layer.padding == "same":
        before = layer.dilation[axis] * (new - 1) // 2 - layer.dilation[axis] * (old - 1) // 2
        if before % layer.dilation[axis]:
            raise SizeError(f"{path}: with dilation {layer.dilation[axis]}, a kernel of {new} can't be centred on one of {old}")
        return int(before // layer.dilation[axis])
    if (new - old) % 2:
        raise SizeError(
            f"{path} has a kernel of {old} along axis {axis}: one of {new} would need padding on one side only; "
            f"the nearest possible sizes are {new - 1} and {new + 1}"
        )
    return (new - old) // 2


def _weight(model: nn.Module, anatomy: Anatomy, layer: nn.Module, path: str) -> str:
    """The name of the convolution's weight; refused unless the convolution uses it as it is stored."""
    for op in anatomy.reading.trace.ops:
        if op.name == "aten.convolution" and op.module == path:
            name: str = anatomy.reading.trace.values[op.args[1].value].name
            if name == f"{path}.weight":
                return name
    reason = "the example does not run it, or its weight is changed before it is used (standardised, normalised, shared)"
    raise MethodError("the kernel can't grow", [Problem(path, reason)])
