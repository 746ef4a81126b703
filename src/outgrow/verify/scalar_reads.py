"""Numbers that a model's code looks at, told once more where there are none.

Code that asks for a number (`if mask.all():`) does not run on tensors without numbers. Where it asks of what comes from the
example alone, the answers are the same as long as the example is: they are noted in a pass with numbers, and given again, in
the same order, in passes without. What comes from the model's own numbers changes as it learns, and is not told.
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

Answers = dict[bool, list[Any]]  # by mode: in training or not
ASK = torch.ops.aten._local_scalar_dense


def answers(model: nn.Module, example: Example) -> Answers | None:
    """What the code asks for in each mode; None if that depends on the model's numbers, or if it does not run."""
    found: Answers = {}
    for training in (False, True):
        asked = Asked(tensors_of(model).values())
        try:
            with untouched(model), elementary():
                model.train(training)
                with asked:
                    call(model, example)
        except Exception:  # a mode that the example is not made for
            return None
        if asked.own:
            return None
        found[training] = asked.answers
    return found


class Asked(TorchDispatchMode):
    """Notes the numbers that are asked for, and whether any depends on tensors of the model's own."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Any] = []
        self.own = False
        self._own = {_memory(tensor): tensor for tensor in own}  # alive, so that no other tensor gets the same memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = any(_memory(leaf) in self._own for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Tensor))
        if func.overloadpacket is ASK:
            self.answers.append(result)
            self.own |= own
        if own or torch.Tag.nondeterministic_seeded in func.tags:
            self._own.update((_memory(leaf), leaf) for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor))
        return result


def _memory(tensor: Tensor) -> int:
    """The same for all views of a tensor: what is written into one is in the others."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except Exception:  # a wrapper without memory of its own
        return id(tensor)


class Answered(TorchDispatchMode):
    """Gives the answers, one after the other; a question too many is an error, as it is without them."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ahead = iter(answers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is ASK:
            return next(self._ahead)
        return func(*args, **(kwargs or {}))
