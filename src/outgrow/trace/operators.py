"""A trace as data: operators in the order in which they ran, and the tensors between them, in single-assignment form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outgrow.model.idle_modules import IdlePeers

FOLD = "outgrow.fold"  # a folded residual: several operators, recorded as one
FAKE_QUANTISE, OBSERVING = "aten._fused_moving_avg_obs_fq_helper", "observing"


@dataclass(frozen=True)
class Ref:
    """Placeholder for a tensor among an operator's arguments."""

    value: int


@dataclass(frozen=True)
class Value:
    """A tensor that existed during the pass: a parameter or buffer (`name`), a model input, or an operator's result."""

    index: int
    shape: tuple[int, ...]
    floating: bool  # real or complex
    kind: str  # "parameter", "buffer", "input", "constant" or "result"
    name: str = ""
    boolean: bool = False  # a mask
    integers: tuple[int, ...] = ()  # the entries of a list with which the code indexes (see `trace/index_lists.py`)


@dataclass(frozen=True)
class Op:
    """One operator call, with tensors replaced by `Ref`s."""

    index: int
    name: str  # e.g. "aten.convolution"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...]
    module: str  # path of the innermost module whose code was running

    @cached_property
    def refs(self) -> list[Ref]:
        """The tensors among all arguments."""
        return refs_in((*self.args, *self.kwargs.values()))


def refs_in(tree: Any) -> list[Ref]:
    """The tensors among an operator's arguments, in order."""
    if isinstance(tree, Ref):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [ref for item in tree for ref in refs_in(item)]
    if isinstance(tree, dict):
        return [ref for item in tree.values() for ref in refs_in(item)]
    return []


@dataclass
class Trace:
    """The record of one or more forward passes."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    outputs: dict[int, None] = field(default_factory=dict)  # in order
    meta: bool = False  # recorded on the meta device
    known: bool = False  # there, with the values of integers and masks (see `model/known_values.py`)
    lists: bool = False  # recorded with the values of lists among indices (see `trace/index_lists.py`)
    gradients: bool = False  # recorded with gradients: the model differentiates itself (see `model/inner_gradients.py`)
    passes: list[bool] = field(default_factory=list)  # for each pass, whether the model was in train mode
    ends: list[int] = field(default_factory=list)  # for each pass, number of operators at its end
    returned: dict[str, int] = field(default_factory=dict)  # for each module that returned a tensor, the index of the first
    idle_peers: IdlePeers = field(default_factory=dict)  # modules that ran only for the trace (see `model/idle_modules.py`)
    others: dict[str, list[int]] = field(default_factory=dict)  # outputs that need not be preserved, by name

    @property
    def unused(self) -> list[str]:
        """Names of the parameters that no operator has used."""
        used = {ref.value for op in self.ops for ref in op.refs}
        return [value.name for value in self.values if value.kind == "parameter" and value.index not in used]
