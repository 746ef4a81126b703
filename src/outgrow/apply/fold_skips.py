"""Route the skip of a sum through a `Fold`, in a block of the user's model.

Where the skip is an `nn.Identity` of the block, the Fold takes its place. Elsewhere the block's `forward` is read with torch.fx
(the block's own code only: its children stay calls), and the Fold, a new child without tensors, is called on one operand of one
sum. The block stays the same object, with its children, hooks and attributes; only its class changes, to one derived from its
own whose `forward` contains that call. (A `GraphModule` in its place would lose the block's class and attributes, and could not
replace the model itself.) A deep copy has the same `forward`; `pickle` reads the code again.

Code that torch.fx does not read as it runs is refused: branches on data, code that differs between training and evaluation,
draws random numbers, or changes attributes.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from outgrow.errors import MethodError, Problem
from outgrow.growth_plan.plan import Graft, Plan
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.model.sandbox import REGISTERED, untouched
from outgrow.modules.fold import Fold
from outgrow.text.plurals import counted
from outgrow.trace.operators import Trace

SUMS = {"aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub"}
FUNCTIONS = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub}
SUM_METHODS = {"add", "add_", "sub", "sub_"}
BASE, FOLD_CALLS = "_outgrow_base", "_outgrow_seams"  # attributes of a derived class: the user's class, and the calls of Folds

FoldCalls = Mapping[tuple[int, int], str]  # (number of the sum, operand) → name of the Fold


class Unreadable(Exception):
    """A block's code can't be read; the message gives the reason."""


class _OwnCode(fx.Tracer):
    """A tracer of a module's own code; its children stay calls."""

    proxy_buffer_attributes = True  # so that code that reads a buffer's values is refused, not traced with constants

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def base_of(block: nn.Module) -> type[nn.Module]:
    """The class that the user wrote."""
    return getattr(type(block), BASE, type(block))


def read_code(block: nn.Module) -> fx.Graph:
    """The user's `forward` as a graph, without Folds; refused if it differs between training and evaluation."""
    graphs = [_read(block, training) for training in (True, False)]
    if len({graph.python_code("self").src for graph in graphs}) > 1:
        raise Unreadable("its code does one thing in training and another in evaluation")
    return graphs[1]


def _read(block: nn.Module, training: bool) -> fx.Graph:
    kind = type(block)
    try:
        with untouched(block):
            block.train(training)
            block.__class__ = base_of(block)
            before, states = _attributes(block), _random_states()
            graph = _OwnCode().trace(block)
            if _attributes(block) != before:
                raise Unreadable("its code makes tensors of its own or changes attributes")
            if states != _random_states():
                raise Unreadable("its code draws random numbers")
            return graph
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(f"torch.fx can't read its code ({str(error).split(chr(10))[0]})") from error
    finally:
        block.__class__ = kind


def _attributes(block: nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in vars(block).items() if name not in REGISTERED}


def _random_states() -> tuple[object, ...]:
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), torch.get_rng_state().tolist(), np.asarray(keys).tolist(), position


def sums_in(graph: fx.Graph) -> list[fx.Node]:
    """The sums of a block's code, in the order in which they run."""
    return [node for node in graph.nodes if _is_sum(node)]


def _is_sum(node: fx.Node) -> bool:
    names = FUNCTIONS if node.op == "call_function" else SUM_METHODS if node.op == "call_method" else ()
    return node.target in names


def graft_at(model: nn.Module, trace: Trace, index: int, operand: int, size: int, dim: int) -> Graft | None:
    """The graft that puts a Fold on one operand of a traced sum; None if a Fold is there already."""
    path = trace.ops[index].module
    block = model.get_submodule(path)
    nodes = sums_in(read_code(block))
    ran = [op.index for op in trace.ops if op.module == path and op.name in SUMS]
    if not nodes or len(ran) % len(nodes):
        raise Unreadable(f"its code contains {counted(len(nodes), 'sum')}, and {len(ran)} ran: they can't be matched")
    number = ran.index(index) % len(nodes)
    skip = _operand(nodes[number], operand)
    called = block.get_submodule(str(skip.target)) if skip.op == "call_module" else None
    if isinstance(called, Fold) or (number, operand) in getattr(type(block), FOLD_CALLS, {}):
        return None
    if isinstance(called, nn.Identity):
        calls = [node for node in skip.graph.nodes if node.op == "call_module" and node.target == skip.target]
        if len(calls) == 1 and len(skip.users) == 1:
            return Graft(path, joined_path(path, str(skip.target)), -1, operand, size, dim)
    name = next(name for n in range(1, 10_000) if not hasattr(block, name := f"fold{n}"))
    return Graft(path, joined_path(path, name), number, operand, size, dim)


def _operand(node: fx.Node, operand: int) -> fx.Node:
    skip = node.args[operand] if operand < len(node.args) else None
    if not isinstance(skip, fx.Node):
        raise Unreadable("the operands of its sum are given by keyword")
    return skip


def apply_graft(model: nn.Module, graft: Graft, journal: Journal) -> None:
    """Put a Fold into a block, unless it is there already."""
    owner_path, _, name = graft.module.rpartition(".")
    owner = model.get_submodule(owner_path)
    there = owner._modules.get(name)
    if isinstance(there, Fold):
        return
    fold = Fold(graft.size, graft.dim).train(owner.training)
    if graft.sum < 0:
        if not isinstance(there, nn.Identity):
            raise MethodError(f"{graft.module} should be an nn.Identity, to be replaced by a folded residual, and is {there!r}")
        journal.note(lambda: owner._modules.__setitem__(name, there))
        owner._modules[name] = fold
        return
    before = type(owner)
    calls = {**getattr(before, FOLD_CALLS, {}), (graft.sum, graft.operand): name}
    try:
        derived = _derive(owner, calls)
    except Unreadable as why:
        raise fold_refusal(graft.block, str(why)) from why

    def undo() -> None:
        owner.__class__ = before
        del owner._modules[name]

    owner._modules[name] = fold
    owner.__class__ = derived
    journal.note(undo)


def apply_grafts(model: nn.Module, plan: Plan, journal: Journal) -> None:
    """Carry out all grafts of a plan; they come before its edits and settings."""
    for graft in plan.grafts:
        apply_graft(model, graft, journal)


def _derive(block: nn.Module, calls: FoldCalls) -> type[nn.Module]:
    """A class derived from the block's own, whose forward calls Folds."""
    graph = read_code(block)
    nodes = sums_in(graph)
    for (number, operand), name in calls.items():
        if number >= len(nodes):
            raise Unreadable(f"its code contains {counted(len(nodes), 'sum')}, and number {number + 1} is to be folded")
        node = nodes[number]
        skip = _operand(node, operand)
        with graph.inserting_before(node):
            node.update_arg(operand, graph.call_module(name, (skip,)))
    code, base = graph.python_code("self"), base_of(block)
    names: dict[str, Any] = dict(code.globals)
    exec(code.src, names)
    contents = {
        "forward": names["forward"],
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": lambda self, protocol: (_revive, (base, dict(calls)), vars(self)),
        BASE: base,
        FOLD_CALLS: dict(calls),
    }
    if not hasattr(base, "__deepcopy__"):
        contents["__deepcopy__"] = _deep_copy
    return type(base.__name__, (base,), contents)


def _deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a block of a derived class, which it shares: the code is not read again."""
    twin: nn.Module = type(self).__new__(type(self))
    memo[id(self)] = twin
    base_of(self).__setstate__(twin, copy.deepcopy(vars(self), memo))
    return twin


def _revive(base: type[nn.Module], seams: dict[tuple[int, int], str]) -> nn.Module:
    """An empty block for `pickle` to fill: it gets its forward once it has its children. Pickled files name this function."""

    def set_state(self: nn.Module, state: dict[str, Any]) -> None:
        self.__class__ = base
        base.__setstate__(self, state)
        self.__class__ = _derive(self, seams)

    empty: type[nn.Module] = type(base.__name__, (base,), {"__setstate__": set_state})
    return empty.__new__(empty)


def fold_refusal(block: str, reason: str) -> MethodError:
    return MethodError(
        "the residual can't be folded there",
        [
            Problem(
                block or "the model",
                f"it adds the skip in its own code, and {reason}",
                "residual='stream' widens the whole stream; or make the skip a module of the block, self.skip = nn.Identity()",
            )
        ],
    )
