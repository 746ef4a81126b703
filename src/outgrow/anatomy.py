"""Trace a model and find its volumes: the first half of every growth, and all that `outgrow.volumes` does."""

from __future__ import annotations

from torch import nn

from outgrow.admit import bare, check_module
from outgrow.draft import irregular
from outgrow.errors import TraceError
from outgrow.finding import find_volumes
from outgrow.methods import BY_NAME
from outgrow.paths import judge
from outgrow.reading import read
from outgrow.rules import RULES
from outgrow.trace import Example, Trace, record
from outgrow.training.compiled import uncompiled
from outgrow.usage import usage
from outgrow.volumes import Anatomy, Volume


def dissect(model: nn.Module, example: Example, both_modes: bool = False) -> Anatomy:
    """The volumes of a model, found in a forward pass on the example."""
    return find_volumes(read(watch(model, example, both_modes), RULES))


def watch(model: nn.Module, example: Example, both_modes: bool = False) -> Trace:
    """Watch the model run on the example, in eval mode and, if asked or if that leaves parameters unused, in train mode too."""
    try:
        trace = record(model, example)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(
            f"the model does not run on the example: {type(error).__name__}: {error}. "
            "Pass example= a tensor, a tuple of positional arguments, or a dict of keyword arguments"
        ) from error
    if both_modes or {value.name for value in trace.values if value.kind == "parameter"} - _touched(trace):
        eval_only = len(trace.ops), len(trace.values), dict(trace.outputs)
        try:
            trace = record(model, example, training=True, trace=trace)
        except Exception:  # batch norm on a single value, say; eval has told what there is to know
            del trace.ops[eval_only[0] :], trace.values[eval_only[1] :]
            trace.outputs = eval_only[2]
    return trace


def _touched(trace: Trace) -> set[str]:
    return {trace.values[ref.value].name for op in trace.ops for ref in op.refs if trace.values[ref.value].name}


@usage("outgrow.volumes(model, example)")
@uncompiled()
def volumes(model: nn.Module, example: Example) -> list[Volume]:
    """All volumes of a model: name, size, slots, whether and by which methods each can grow, and if not, why.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [(volume.name, volume.size, volume.growable) for volume in volumes(model, torch.zeros(1, 4))]
        [('0', 8, True), ('0#2', 4, False), ('2', 2, False)]
    """
    model = bare(model)
    check_module(model)
    anatomy = dissect(model, example)
    for volume in anatomy.volumes:
        explain(anatomy, volume)
    return list(anatomy.volumes)


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
    for name, methods in BY_NAME.items():
        if name in ("auto", "random"):
            continue
        verdicts = [judge(anatomy, volume, method.state) for method in methods]
        refusals = [verdict.refusal or (verdict.stuck if len(methods) > 1 else "") for verdict in verdicts]
        if all(refusals):
            reasons.append(f"{name}: {refusals[0]}")
        else:
            legal.append(name)
    volume.methods, volume.reason = tuple(legal), "; ".join(reasons)
