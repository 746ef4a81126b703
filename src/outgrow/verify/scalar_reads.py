"""Replay the scalars that a model's code reads (`.item()`, `if mask.all():`), so that it can also run on meta tensors.

Code that reads a scalar does not run on the meta device. If the scalar depends on the example only, it is the same as long as
the example is: the scalars are recorded in a pass with values, and returned in the same order in passes on the meta device.
Scalars that depend on the model's own tensors change in training, and are not replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from outgrow.model.example import Example, call
from outgrow.model.sandbox import elementary, tensors_of, untouched

ScalarReads = dict[bool, list[Any]]  # by mode: whether in training
READ_SCALAR = torch.ops.aten._local_scalar_dense


def read_scalars(model: nn.Module, example: Example) -> ScalarReads | None:
    """The scalars that the code reads in each mode; None if one depends on the model, or if the model does not run."""
    found: ScalarReads = {}
    for training in (False, True):
        recorder = RecordScalars(tensors_of(model).values())
        try:
            with untouched(model), elementary():
                model.train(training)
                with recorder:
                    call(model, example)
        except Exception:  # the example is unsuitable for this mode
            return None
        if recorder.depends_on_model:
            return None
        found[training] = recorder.scalars
    return found


class RecordScalars(TorchDispatchMode):
    """Records the scalars that are read, and whether any depends on the model's own tensors or on noise."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars: list[Any] = []
        self.depends_on_model = False
        self._own = {_memory(tensor): tensor for tensor in own}  # kept alive, so that no other tensor gets the same memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = any(_memory(leaf) in self._own for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Tensor))
        if func.overloadpacket is READ_SCALAR:
            self.scalars.append(result)
            self.depends_on_model |= own
        if own or torch.Tag.nondeterministic_seeded in func.tags:
            self._own.update((_memory(leaf), leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
        return result


def _memory(tensor: Tensor) -> int:
    """Identity of a tensor's storage, which its views share: a write into one changes the others."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # a wrapper without storage of its own
        return id(tensor)


class ReplayScalars(TorchDispatchMode):
    """Returns recorded scalars in order; reading more than were recorded is an error."""

    def __init__(self, scalars: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ahead = iter(scalars)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is READ_SCALAR:
            return next(self._ahead)
        return func(*args, **(kwargs or {}))
