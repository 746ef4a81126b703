"""Watch for optimizers that a growth left behind: nobody passed them to it.

Before any step, state that still has the shape from before is an error: a fused optimizer would read past the end of its state
and take the process down. An optimizer that trains a block but not the new one beside it is told so, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from outgrow.apply import edits_by_tensor
from outgrow.errors import Problem, StaleOptimizerError
from outgrow.plan import Insertion, Plan
from outgrow.sandbox import tensors_of
from outgrow.training.optimizer import ANEW, expected_shape, held_by


def shapes_before(model: nn.Module, plan: Plan) -> list[tuple[Tensor, str, tuple[int, ...]]]:
    """Tensors that a plan, which has just been carried out, has given another shape, and the one they had."""
    tensors = tensors_of(model)
    result = []
    for name, edits in edits_by_tensor(plan).items():
        shape = list(tensors[name].shape)
        for edit in reversed(edits):
            if isinstance(edit, Insertion):
                shape[edit.axis] = edit.size
        if tuple(shape) != tuple(tensors[name].shape):
            result.append((tensors[name], name, tuple(shape)))
    return result


def watch_for_stale(
    changed: Sequence[tuple[Tensor, str, tuple[int, ...]]], new: Sequence[tuple[nn.Parameter, nn.Parameter, str]], call: str
) -> None:
    """From now on, stop any optimizer that steps on a grown parameter with state from before the growth.

    Those that were passed to the growth need no word here: their state fits, and that is what is looked at.

    new: parameters of new modules, each with the one beside it that an optimizer should hold too, and its name.
    call: the name of the function that made the growth.
    """
    for tensor, name, shape in changed:
        _WATCH.remember(tensor, name, shape, call)
    for parameter, beside, name in new:
        _WATCH.added[parameter] = beside, name
    _WATCH.start()


def watch_for_gone(parameters: Sequence[tuple[Tensor, str]]) -> None:
    """From now on, stop any optimizer that still holds one of these: others have taken their place in the model."""
    for parameter, name in parameters:
        _WATCH.gone[parameter] = name
    if parameters:
        _WATCH.start()


class _Watch:
    """Which parameters have grown, and which optimizers have been seen to fit them since.

    The one thing here that lives at module level and changes: torch calls the hook for every optimizer of the process, also for
    those that nobody passed to us, so there is no caller who could hand it over. It holds nothing alive.
    """

    def __init__(self) -> None:
        self.grown: Any = WeakTensorKeyDictionary()  # parameter → (name, shapes that it had before, what grew it last)
        self.added: Any = WeakTensorKeyDictionary()  # new parameter → (the one it goes with, name)
        self.gone: Any = WeakTensorKeyDictionary()  # parameter that is in no model any more → name
        self.fitting: WeakSet[Optimizer] = WeakSet()
        self.listening: WeakSet[Optimizer] = WeakSet()
        self.started = False

    def remember(self, parameter: Tensor, name: str, shape: tuple[int, ...], call: str) -> None:
        _, shapes, _ = self.grown.get(parameter, (name, frozenset(), call))
        self.grown[parameter] = name, shapes | {shape}, call

    def start(self) -> None:
        """Look at every optimizer again at its next step; the hook is registered with the first growth, not by an import."""
        self.fitting.clear()
        if not self.started:
            register_optimizer_step_pre_hook(_before_step)
            self.started = True

    def fits(self, optimizer: Optimizer) -> None:
        """No need to look again, until the next growth or until other state is loaded."""
        self.fitting.add(optimizer)
        if optimizer not in self.listening:
            self.listening.add(optimizer)
            optimizer.register_load_state_dict_post_hook(_after_load)


_WATCH = _Watch()


def _after_load(optimizer: Optimizer) -> None:
    _WATCH.fitting.discard(optimizer)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or optimizer in _WATCH.fitting:
        return
    problems = list(_stale(optimizer))
    if problems:
        calls = (_WATCH.grown[parameter][2] for parameter in held_by(optimizer) if parameter in _WATCH.grown)
        call = next(calls, "grow")
        raise StaleOptimizerError(
            f"{type(optimizer).__name__} holds state from before its parameters grew; it did not step. Pass it to the growth, "
            f"outgrow.{call}(model, example, …, optimizer=optimizer), so that its state grows too; or {ANEW}",
            problems,
        )
    _WATCH.fits(optimizer)
    left_out = list(_left_out(optimizer))
    if left_out:
        warnings.warn(
            f"{type(optimizer).__name__} trains what {left_out[0]} and {len(left_out) - 1} more new parameters stand beside, "
            "but not these. Pass it to the growth (optimizer=optimizer), or give them an optimizer of their own",
            stacklevel=4,
        )


def _left_out(optimizer: Optimizer) -> Iterator[str]:
    """New parameters that an optimizer does not hold, though it holds the ones that they go with."""
    held = {id(parameter) for parameter in held_by(optimizer)}
    for parameter, (beside, name) in list(_WATCH.added.items()):
        if id(beside) in held and id(parameter) not in held:
            yield name


def _stale(optimizer: Optimizer) -> Iterator[Problem]:
    held = list(held_by(optimizer))
    for parameter in held:
        if parameter in _WATCH.gone:
            yield Problem(_WATCH.gone[parameter], "the model was sharded again after it grew, and has another parameter there")
    entries = [(parameter, *_WATCH.grown[parameter][:2]) for parameter in held if parameter in _WATCH.grown]
    if isinstance(optimizer, LBFGS) and entries:
        total = sum(parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in held)
        flat = optimizer.state.get(held[0], {}).get("prev_flat_grad")
        for found in (getattr(optimizer, "_numel_cache", None), None if flat is None else flat.numel()):
            if found not in (None, total):
                yield Problem(entries[0][1], f"the flat history has {found} entries, the parameters have {total}")
                return
    for parameter, name, former in entries:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and _outdated(key, value, tuple(parameter.shape), former):
                yield Problem(name, f"{key!r} has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}")


def _outdated(key: str, value: Tensor, shape: tuple[int, ...], former: frozenset[tuple[int, ...]]) -> bool:
    """Of unknown state only this much is known: of the parameter's own former shape, it is from before.

    Square matrices over one of the axes, as preconditioners are, may have that shape by chance.
    """
    expected, found = expected_shape(key, value, shape), tuple(value.shape)
    if expected is not None:
        return found != expected
    square = len(found) == 2 and found[0] == found[1] and found[0] in shape
    return found in former and found != shape and not square
