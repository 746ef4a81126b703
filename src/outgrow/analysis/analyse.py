"""Trace a model and find its volumes: the first half of every growth, and all that `outgrow.volumes` does."""

from __future__ import annotations

from torch import nn

from outgrow.analysis.find_volumes import find_volumes
from outgrow.analysis.interpret_trace import read
from outgrow.analysis.rules.all_rules import RULES
from outgrow.analysis.unused_parameters import pin_doubtful
from outgrow.analysis.volumes import Anatomy
from outgrow.errors import Problem, TraceError
from outgrow.model.example import Example
from outgrow.model.idle_modules import IdlePeers, idle_peers
from outgrow.model.sandbox import tensors_of
from outgrow.process.garbage_collection import without_garbage_collection
from outgrow.trace.operators import Trace
from outgrow.trace.record import record


def dissect(model: nn.Module, example: Example, both_modes: bool = False) -> Anatomy:
    """The volumes of a model, found in a forward pass on the example."""
    with without_garbage_collection():
        anatomy = find_volumes(read(watch(model, example, both_modes), RULES))
        pin_doubtful(anatomy)
        return anatomy


def watch(model: nn.Module, example: Example, both_modes: bool = False) -> Trace:
    """Watch the model run on the example, in eval mode and, if asked or if that leaves parameters unused, in train mode too.

    Modules that do not run in either are watched in the place of others like them that do (see `model/idle_modules.py`).
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
    beside = idle_peers(model, trace.unused) if trace.unused else {}
    if beside:
        try:
            return _watched(model, example, both_modes, beside)
        except Exception:  # they do not run on what the others are given
            return trace
    return trace


def _watched(model: nn.Module, example: Example, both_modes: bool, beside: IdlePeers) -> Trace:
    trace = record(model, example, idle_peers=beside)
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
