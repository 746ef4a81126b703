"""Detect optimizers with stale state: those that were not passed to a growth of their parameters.

A step with state from before the growth is an error: a fused optimizer would read past the end of its state and crash the
process. There must be no false alarm, so state counts as stale only in these cases:

    classes that outgrow knows   a tensor's shape is not the one that follows from the parameter's, even if it was loaded since
    all other classes            a tensor was in the state at the growth, with the parameter's previous shape, and still is

Other classes keep moments of any shape under the same keys (one value per tensor, a projection), so that a shape alone proves
nothing. An optimizer that was made after the growth has no tensors from before it. State that can't be read is ignored.

An optimizer that trains a block but not the new block beside it is reported once, by a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from outgrow.apply.final_positions import edits_by_tensor
from outgrow.errors import Problem, StaleOptimizerError
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.model.other_optimizers import WeakNotes, held_parameters, state_of, states_with
from outgrow.optimizers.lookup import state_shape
from outgrow.optimizers.state_rules import Shape

FUSED = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"})  # keys that fused kernels read
Changed = Sequence[tuple[Tensor, str, Shape]]  # a grown tensor, its name, and its previous shape


def shapes_before(tensors: Mapping[str, Tensor], plan: Plan) -> list[tuple[Tensor, str, Shape]]:
    """The tensors whose shape a plan, just carried out, has changed, with their names and previous shapes."""
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
    changed: Changed, new: Sequence[tuple[nn.Parameter, nn.Parameter, str]], call: str, passed: Sequence[Optimizer] = ()
) -> None:
    """From now on, raise before any optimizer steps on a grown parameter with state from before the growth.

    new: parameters of new modules, each with the parameter whose optimizer should hold it too, and its name.
    call: the name of the function that made the growth. passed: optimizers whose state has grown.
    """
    for tensor, name, _ in changed:
        _WATCH.grown[tensor] = name, call
    for tensor, shape in _states_left_behind(changed, passed):
        _WATCH.left[tensor] = shape
    for parameter, beside, name in new:
        _WATCH.added[parameter] = beside, name
    _WATCH.start()


def watch_for_gone(parameters: Sequence[tuple[Tensor, str]]) -> None:
    """From now on, raise before any optimizer steps that still holds one of these parameters, which the model has replaced."""
    for parameter, name in parameters:
        _WATCH.gone[parameter] = name
    if parameters:
        _WATCH.start()


class _Watch:
    """The parameters that have grown, the state that did not grow with them, and the optimizers that were checked since.

    It is mutable state at module level, because torch calls the hook for every optimizer of the process, also for those that
    were passed to no growth, so that no caller could pass it on. It keeps no model and no optimizer alive.
    """

    def __init__(self) -> None:
        self.grown: Any = WeakTensorKeyDictionary()  # parameter → (name, the call that grew it last)
        self.left: Any = WeakTensorKeyDictionary()  # tensor of an optimizer's state → its shape at the growth
        self.added: Any = WeakTensorKeyDictionary()  # new parameter → (the one whose group it should join, name)
        self.gone: Any = WeakTensorKeyDictionary()  # parameter that is no longer in a model → name
        self.checked = WeakNotes()  # optimizer → the state that was checked
        self.started = False

    def start(self) -> None:
        """Check every optimizer again at its next step; the hook is registered with the first growth, not by an import."""
        self.checked.clear()
        if not self.started:
            register_optimizer_step_pre_hook(_before_step)
            self.started = True


_WATCH = _Watch()


class _Checked:
    """The state of one grown parameter at a check. `load_state_dict` replaces the object: then it is checked again.

    State that contains objects, which might refer to the optimizer and keep it alive, is neither kept nor checked again.
    """

    def __init__(self, optimizer: Optimizer, entries: Sequence[tuple[Tensor, str]]) -> None:
        self.parameter = ref(entries[0][0]) if entries else None
        self.state = self._now(optimizer)

    def holds(self, optimizer: Optimizer) -> bool:
        return self._now(optimizer) is self.state

    def _now(self, optimizer: Optimizer) -> Any:
        parameter = None if self.parameter is None else self.parameter()
        state = {} if parameter is None else state_of(optimizer, parameter)
        return state if state and all(isinstance(value, (Tensor, int, float, str)) for value in state.values()) else None


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    try:
        error, left_out = _check(optimizer)
    except Exception:  # an optimizer that can't be read is ignored
        return
    if error is not None:
        raise error
    if left_out:
        warnings.warn(
            f"{type(optimizer).__name__} does not train the new parameters {left_out[0]} and {len(left_out) - 1} more, only "
            "those beside them. Pass it to the growth (optimizer=optimizer), or give them an optimizer of their own",
            stacklevel=4,
        )


def _check(optimizer: Any) -> tuple[StaleOptimizerError | None, list[str]]:
    """The error for stale state, if there is any, and the new parameters that the optimizer should hold but does not."""
    checked = _WATCH.checked.get(optimizer)
    if checked is not None and checked.holds(optimizer):
        return None, []
    held = held_parameters(optimizer)
    entries = [(parameter, _WATCH.grown[parameter][0]) for parameter in held if parameter in _WATCH.grown]
    problems = [*_gone(held), *_stale(optimizer, held, entries)]
    if problems:
        call = _WATCH.grown[entries[0][0]][1] if entries else "grow"
        found = f"{type(optimizer).__name__} holds state from before its parameters grew; it did not step."
        way_out = (
            f"Pass it to the growth, outgrow.{call}(model, example, …, optimizer=optimizer), so that its state grows too; or "
            "make a new optimizer after the growth"
        )
        if isinstance(optimizer, LBFGS):
            way_out = "Its state can't grow: make a new optimizer after the growth"
        return StaleOptimizerError(f"{found} {way_out}", problems), []
    _WATCH.checked.put(optimizer, _Checked(optimizer, entries))
    return None, [] if checked is not None else list(_left_out(held))


def _left_out(held: Sequence[Tensor]) -> Iterator[str]:
    """New parameters that an optimizer does not hold, although it holds those whose group they should join."""
    known = {id(parameter) for parameter in held}
    for parameter, (beside, name) in list(_WATCH.added.items()):
        if id(beside) in known and id(parameter) not in known:
            yield name


def _gone(held: Sequence[Tensor]) -> Iterator[Problem]:
    for parameter in held:
        if parameter in _WATCH.gone:
            yield Problem(_WATCH.gone[parameter], "the model was sharded again after it grew, and has another parameter there")


def _stale(optimizer: Any, held: Sequence[Tensor], entries: Sequence[tuple[Tensor, str]]) -> Iterator[Problem]:
    if isinstance(optimizer, LBFGS) and entries:
        yield from _stale_history(optimizer, held, entries[0][1])
    fused = _runs_fused(optimizer)
    for parameter, name in entries:
        shape = tuple(parameter.shape)
        for key, value in state_of(optimizer, parameter).items():
            if not isinstance(value, Tensor) or value.ndim == 0 or tuple(value.shape) == shape:
                continue
            found, expected = tuple(value.shape), state_shape(optimizer, key, value, shape)
            if expected is None and fused and key in FUSED:
                expected = shape
            if _WATCH.left.get(value) == found if expected is None else found != expected:
                yield Problem(name, f"{key!r} has shape {found}, the parameter {shape}")


def _stale_history(optimizer: LBFGS, held: Sequence[Tensor], name: str) -> Iterator[Problem]:
    """Problems with LBFGS, which keeps vectors over all parameters in the state of the first one."""
    total = sum(parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in held)
    flat = state_of(optimizer, held[0]).get("prev_flat_grad")
    for found in (getattr(optimizer, "_numel_cache", None), None if flat is None else flat.numel()):
        if found not in (None, total):
            yield Problem(name, f"the flat history has {found} entries, the parameters have {total}")
            return


def _runs_fused(optimizer: Any) -> bool:
    """Whether an optimizer's state may reach torch's fused kernels, which do not check shapes, from a derived class."""
    derived = any(kind.__module__.startswith("torch.optim.") and kind is not Optimizer for kind in type(optimizer).__mro__)
    return derived and any(group.get("fused") for group in optimizer.param_groups)


def _states_left_behind(changed: Changed, passed: Sequence[Optimizer]) -> Iterator[tuple[Tensor, Shape]]:
    """Tensors of the previous shapes in the state of optimizers that were not passed to the growth.

    These optimizers have to be searched for. If every grown parameter is held by an optimizer that was passed, another one is
    unlikely, and the search is left out.
    """
    trained = {id(parameter) for optimizer in passed for parameter in held_parameters(optimizer)}
    if all(id(tensor) in trained or not tensor.requires_grad for tensor, _, _ in changed):
        return
    followed = {id(getattr(optimizer, "state", None)) for optimizer in passed}
    previous = {id(tensor): shape for tensor, _, shape in reversed(changed)}
    for parameter, holder, state in states_with([tensor for tensor, _, _ in changed if id(tensor) not in trained]):
        for value in state.values():
            if id(holder) not in followed and isinstance(value, Tensor) and tuple(value.shape) == previous[id(parameter)]:
                yield value, tuple(value.shape)
