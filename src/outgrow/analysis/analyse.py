"""Trace a model and find its volumes: the first half of every growth, and the whole of `outgrow.volumes`."""

from __future__ import annotations

from torch import nn

from outgrow.analysis.find_volumes import find_volumes
from outgrow.analysis.interpret_trace import read
from outgrow.analysis.rules.all_rules import RULES
from outgrow.analysis.unused_parameters import pin_doubtful
from outgrow.analysis.volumes import Anatomy
from outgrow.errors import Problem, SelectionError, TraceError
from outgrow.model.example import Example
from outgrow.model.example_errors import does_not_run
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
    """Trace the model on the example in eval mode; in train mode too if `both_modes`, or if eval mode leaves parameters unused.

    A module that runs in neither mode is traced in the place of a similar one that runs (see `model/idle_modules.py`).
    """
    try:
        trace = _watched(model, example, both_modes, {})
    except (TraceError, SelectionError):
        raise
    except Exception as error:
        if any(tensor.is_meta for tensor in tensors_of(model).values()):
            raise without_values(error) from error
        raise does_not_run(model, example, error) from error
    peers = idle_peers(model, trace.unused) if trace.unused else {}
    if peers:
        try:
            return _watched(model, example, both_modes, peers)
        except Exception:  # they do not run on the inputs of the modules that they replace
            return trace
    return trace


def _watched(model: nn.Module, example: Example, both_modes: bool, peers: IdlePeers) -> Trace:
    trace = record(model, example, idle_peers=peers)
    if both_modes or trace.unused:
        eval_only = len(trace.ops), len(trace.values), dict(trace.outputs)
        try:
            trace = record(model, example, training=True, trace=trace)
        except Exception:  # for example, batch norm on a single value; the trace in eval mode is enough
            del trace.ops[eval_only[0] :], trace.values[eval_only[1] :]
            trace.outputs = eval_only[2]
    return trace


def without_values(error: Exception) -> TraceError:
    """The error for a model on the meta device that does not run there: most likely its code reads a value."""
    found = f"it does not run there: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    way_out = (
        "if its code reads values of the example, such as a mask, pass the example with values, not on the meta device; if it "
        "reads others, load the weights first (model.to_empty(…), load_state_dict)"
    )
    return TraceError("the model is on the meta device, without values", [Problem("the model", found, way_out)])
