"""Trace a model and find its volumes: the first half of every growth, and all that `outgrow.volumes` does."""

from __future__ import annotations

from torch import nn

from outgrow.admit import bare, check_module
from outgrow.doubtful import pin_doubtful
from outgrow.draft import irregular
from outgrow.errors import Problem, TraceError
from outgrow.finding import find_volumes
from outgrow.garbage import collected_later
from outgrow.lengthen import lengthened, multiplicities, stationary
from outgrow.methods import by_name
from outgrow.paths import judge
from outgrow.reading import read
from outgrow.rules import RULES
from outgrow.sandbox import tensors_of
from outgrow.shorten import shortened
from outgrow.trace import Example, Trace, record
from outgrow.training.compiled import uncompiled
from outgrow.unrun import Understudies, understudies
from outgrow.usage import usage
from outgrow.volumes import Anatomy, Volume


def dissect(model: nn.Module, example: Example, both_modes: bool = False) -> Anatomy:
    """The volumes of a model, found in a forward pass on the example."""
    with collected_later():
        anatomy = find_volumes(read(watch(model, example, both_modes), RULES))
        pin_doubtful(anatomy)
        return anatomy


def watch(model: nn.Module, example: Example, both_modes: bool = False) -> Trace:
    """Watch the model run on the example, in eval mode and, if asked or if that leaves parameters unused, in train mode too.

    Modules that do not run in either are watched in the place of others like them that do (see `unrun`).
    """
    try:
        trace = _watched(model, example, both_modes, {})
    except TraceError:
        raise
    except Exception as error:
        if any(tensor.is_meta for tensor in tensors_of(model).values()):
            raise without_values(error) from error
        raise TraceError(
            f"the model does not run on the example: {type(error).__name__}: {error}. "
            "Pass example= a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        ) from error
    beside = understudies(model, trace.unused) if trace.unused else {}
    if beside:
        try:
            return _watched(model, example, both_modes, beside)
        except Exception:  # they do not run on what the others are given
            return trace
    return trace


def _watched(model: nn.Module, example: Example, both_modes: bool, beside: Understudies) -> Trace:
    trace = record(model, example, understudies=beside)
    if both_modes or trace.unused:
        eval_only = len(trace.ops), len(trace.values), dict(trace.outputs)
        try:
            trace = record(model, example, training=True, trace=trace)
        except Exception:  # batch norm on a single value, say; eval has told what there is to know
            del trace.ops[eval_only[0] :], trace.values[eval_only[1] :]
            trace.outputs = eval_only[2]
    return trace


def without_values(error: Exception) -> TraceError:
    """A model on the meta device does not run there: most likely its code reads a value, which it does not have."""
    found = f"it does not run there: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    way_out = "if its code reads values, load the weights first (model.to_empty(…), load_state_dict); else give another example"
    return TraceError("the model is on the meta device, without values", [Problem("the model", found, way_out)])


@usage("outgrow.volumes(model, example)")
@uncompiled()
def volumes(model: nn.Module, example: Example) -> list[Volume]:
    """All volumes of a model: name, size, slots, whether and by which methods each can grow, and if not, why.

    The model may be on the meta device: volumes depend on its code and its shapes, not on values.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [(volume.name, volume.size, volume.growable) for volume in volumes(model, torch.zeros(1, 4))]
        [('0', 8, True), ('0#2', 4, False), ('2', 2, False)]
    """
    model = bare(model)
    check_module(model, numbers=False)
    with collected_later():
        return _volumes_in(watch(model, example))


def _volumes_in(trace: Trace) -> list[Volume]:
    """All volumes of a trace; those of blocks that others stand for are not searched for, but copied."""
    short = shortened(trace)
    if short is not None:
        anatomy = find_volumes(read(short.trace, RULES), multiplicities(short))
        found = lengthened(short, _explained(anatomy)) if stationary(short, anatomy) else None
        if found is not None:
            return found
    anatomy = find_volumes(read(trace, RULES))
    pin_doubtful(anatomy)
    return list(_explained(anatomy).volumes)


def _explained(anatomy: Anatomy) -> Anatomy:
    for volume in anatomy.volumes:
        explain(anatomy, volume)
    return anatomy


def explain(anatomy: Anatomy, volume: Volume) -> None:
    """Fill in by which methods a volume can grow exactly, and why not by the others."""
    if volume.pinned:
        volume.reason = volume.pinned
        return
    problem = irregular(anatomy, volume)
    if problem is not None:
        volume.reason = str(problem)
        return
    legal, reasons = [], []
    for name, methods in by_name().items():
        if name == "auto" or not methods[0].exact:
            continue
        verdicts = [judge(anatomy, volume, method.state) for method in methods]
        refusals = [verdict.refusal or (verdict.stuck if len(methods) > 1 else "") for verdict in verdicts]
        if all(refusals):
            said: dict[str, str] = {}  # refusal → the first method that it is the reason against
            for method, refusal in zip(methods, refusals, strict=True):
                said.setdefault(refusal, method.name)
            reasons += [f"{first}: {refusal}" for refusal, first in said.items()]
        else:
            legal.append(name)
    volume.methods, volume.reason = tuple(legal), "; ".join(reasons)
