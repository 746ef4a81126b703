"""Add the parameters of new modules to the optimizers that hold the parameters of the modules they are copies of.

In an optimizer that counts steps per parameter, a new parameter starts like any parameter at the beginning of training: it gets
no state here. Where steps are counted per group (or not at all), the count is large already: a second moment that starts at
zero would make the first update about three learning rates long. There a new parameter gets state that fits the count: moments
of zero, second moments at the mean over the parameter that it follows, and its own values where weights are kept.

On request (`state="copy"` in a schedule) a parameter that is an exact copy starts with a copy of its original's state instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outgrow.errors import OptimizerError, Problem
from outgrow.model.journal import Journal
from outgrow.optimizers.factored import Axes, axes_of
from outgrow.optimizers.grow_optimizers import refusal, state_problems, unknown_wrappers
from outgrow.optimizers.grow_state import axis_of, mapped
from outgrow.optimizers.lookup import known
from outgrow.optimizers.preconditioners import level_of
from outgrow.optimizers.quantised import decoded
from outgrow.optimizers.state_rules import PLAIN, StateRule, shape_of
from outgrow.optimizers.wrappers import NEW_ONE, held_by, unwrapped

LEARNS = "the new block learns, although the block that it copies is frozen"


def add_new_parameters(
    optimizers: Sequence[Any],
    model: nn.Module,
    sources: Sequence[tuple[str, str]],
    journal: Journal,
    copy_state: bool = False,
) -> list[tuple[nn.Parameter, nn.Parameter, str]]:
    """Add the parameters of new modules to the optimizers that hold the parameters of the modules they are copies of.

    A new parameter joins the group of its source, in the order of `named_parameters()`, so that states keyed by position stay
    right. In a module that is no copy, it joins the nearest parameter before it with as many axes; if its source is frozen and
    held by no optimizer, the nearest parameter that an optimizer holds.

    sources: path of a new module, and of the module that it is a copy of. copy_state: exact copies get the state of their
    originals.
    Returns every new parameter with the parameter whose group it joined, and its name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    place = {key: index for index, key in enumerate(names)}
    trained = {id(p) for optimizer in unwrapped(optimizers) for p in held_by(optimizer)}
    joins: dict[int, list[nn.Parameter]] = {}  # new parameters, by the id of the parameter whose group they join
    copied: set[int] = set()  # ids of new parameters that are exact copies of the parameter that they join
    for new, old in sources:
        originals = dict(model.get_submodule(old).named_parameters())
        for name, parameter in model.get_submodule(new).named_parameters():
            source = originals.get(name)
            like = _nearest(model, parameter, new, [f"{path}." for path, _ in sources]) if source is None else source
            if not like.requires_grad and id(like) not in trained:
                near = [p for p in model.parameters() if id(p) in trained and p.requires_grad]
                gaps = [(p.ndim != parameter.ndim, abs(place[id(p)] - place[id(parameter)])) for p in near]
                like = near[gaps.index(min(gaps))] if near else like
            joins.setdefault(id(like), []).append(parameter)
            if copy_state and like is source and like.shape == parameter.shape and torch.equal(like, parameter):
                copied.add(id(parameter))
    problems = unknown_wrappers(optimizers) if joins else []
    if problems:
        raise OptimizerError("an optimizer can't follow the growth", problems)
    done: set[int] = set()  # ids of groups: a wrapper and the optimizer in it share theirs
    for optimizer in unwrapped(optimizers):
        joining = [(held, added) for held in held_by(optimizer) for added in joins.get(id(held), ())]
        found = refusal(optimizer) if joining else None
        states = [(held, added, names[id(added)]) for held, added in joining if id(added) not in copied]
        problems = list(_unlike(optimizer, states)) if found is None else [found]
        if problems:
            raise OptimizerError("an optimizer can't follow the growth", problems)
        for held_one, added in joining:
            if id(added) in copied:
                _copy_state(optimizer, held_one, added, journal)
            else:
                _add_state(optimizer, held_one, added, journal)
        for group in (group for group in optimizer.param_groups if id(group) not in done):
            done.add(id(group))
            held = group["params"]
            news = [added for parameter in held for added in joins.get(id(parameter), ())]
            ordered = [place.get(id(parameter), -1) for parameter in held]
            journal.note(partial(group.__setitem__, "params", held))
            if ordered == sorted(ordered):
                group["params"] = sorted([*held, *news], key=lambda parameter: place.get(id(parameter), -1))
            else:
                group["params"] = [p for parameter in held for p in (parameter, *joins.get(id(parameter), ()))]
            if "param_names" in group:
                known = dict(zip(map(id, held), group["param_names"], strict=True))
                journal.note(partial(group.__setitem__, "param_names", group["param_names"]))
                group["param_names"] = [names.get(id(p), known.get(id(p), "")) for p in group["params"]]
    likes = {id(parameter): parameter for parameter in model.parameters()}
    return [(new, likes[key], names[id(new)]) for key, news in joins.items() for new in news]


def unfreeze(model: nn.Module, paths: Sequence[str]) -> None:
    """Make new modules trainable that are copies of frozen ones."""
    for module in (model.get_submodule(path) for path in paths):
        if is_frozen(module):
            for parameter in _trainable(module):
                parameter.requires_grad_(True)


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them is trained."""
    own = _trainable(module)
    return bool(own) and not any(parameter.requires_grad for parameter in own)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]


def _nearest(model: nn.Module, parameter: nn.Parameter, inside: str, new: Sequence[str]) -> nn.Parameter:
    """The nearest parameter before a new module with as many axes as `parameter`, or else the nearest one."""
    others = list(model.named_parameters())
    start = next(index for index, (name, _) in enumerate(others) if name.startswith(f"{inside}."))
    known = [(index, other) for index, (name, other) in enumerate(others) if not name.startswith(tuple(new))]
    before = [other for index, other in reversed(known) if index < start] or [other for _, other in known]
    return next((other for other in before if other.ndim == parameter.ndim), before[0])


@torch.no_grad()
def _copy_state(optimizer: Optimizer, like: Tensor, new: nn.Parameter, journal: Journal) -> None:
    """Give a copy of a parameter a copy of that parameter's state, with its step count."""
    state = optimizer.state.get(like)
    if state and new not in optimizer.state:
        journal.note(partial(optimizer.state.pop, new, None))
        optimizer.state[new] = copy.deepcopy(state)


def _unlike(optimizer: Optimizer, joining: Sequence[tuple[Tensor, Tensor, str]]) -> Iterator[Problem]:
    """Problems with new parameters whose state can't be made after that of the parameters that they join.

    joining: the parameter that is joined, the new one, and its name.
    """
    about = known(optimizer)
    for like, new, name in joining:
        if about.counts_per_parameter or not optimizer.state.get(like):
            continue
        yield from state_problems(optimizer, like, name, tuple(like.shape))
        if like.ndim != new.ndim and any(rule.kind in ("factor", *PLAIN) for rule in about.rules.values()):
            reason = f"its state depends on the number of axes, and it holds no parameter with {new.ndim} axes before this one"
            yield Problem(name, f"{type(optimizer).__name__} can't follow: {reason}", NEW_ONE)


@torch.no_grad()
def _add_state(optimizer: Optimizer, like: Tensor, new: nn.Parameter, journal: Journal) -> None:
    """Give a new parameter state that fits the step count of its group, if the parameter that it joins has state."""
    about, state = known(optimizer), optimizer.state.get(like)
    if about.counts_per_parameter or not state or new in optimizer.state:
        return
    made = {}
    for key, value in decoded(optimizer, like, state).items():
        rule = about.rule(key)
        if rule is not None and rule.kind != "fresh":
            made[key] = _new_state(rule, key, value, like, new, axes_of(optimizer, about.name, like, new.shape))
    journal.note(partial(optimizer.state.pop, new, None))
    optimizer.state[new] = made


def _new_state(rule: StateRule, key: Any, value: Any, like: Tensor, new: Tensor, axes: Axes | None) -> Any:
    """State for a new parameter under one key, by the value that is kept there for the parameter that it joins."""
    if rule.kind == "scalar":
        return copy.deepcopy(value)
    if rule.kind == "matrices":
        if isinstance(value, Tensor):
            return _new_matrix(value, axis_of(key), new, rule)
        return type(value)(
            _new_matrix(item, axis, new, rule) if isinstance(item, Tensor) else item for axis, item in enumerate(value)
        )

    def make(tensor: Tensor) -> Tensor:
        if rule.kind == "weights":
            own = new.detach().to(tensor.dtype, copy=True)
            return own if tensor.shape == like.shape else own.flatten()
        entries = rule.kind == "entries" and tensor.shape == like.shape  # not flattened, whatever the number of axes
        shape = tuple(new.shape) if entries else shape_of(rule, tensor, tuple(new.shape), axes)
        level = tensor.float().mean().item() if rule.start == "mean" else 0.0
        if shape == tuple(new.shape):
            return torch.full_like(new, level, dtype=tensor.dtype, requires_grad=False)  # of the same memory format
        return torch.full(shape or (), level, dtype=tensor.dtype, device=tensor.device)

    return mapped(value, make)


def _new_matrix(matrix: Tensor, axis: int, new: Tensor, rule: StateRule) -> Tensor:
    """A multiple of the identity over an axis of a new parameter; only its diagonal if `matrix` is a vector."""
    values = level_of(matrix, rule.start).expand(new.shape[axis]).clone()
    return values if matrix.ndim == 1 else values.diag()
