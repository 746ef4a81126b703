"""Optimizers follow a growth: what they remember of a parameter is grown by the edits that grew the parameter.

Let a copy of a unit take the share α of it. On the side where it is written, its gradient is then α times its source's, at all
past steps too, so that whatever an optimizer has gathered from gradients g is known for the copy without replaying anything:

    averages of g × α,   averages, sums and maxima of g² × α²,   maxima of |g| × α,   what is made of g / √(average of g²) × 1.

This is exact as long as the optimizer adds nothing to g but g (weight decay inside the gradient makes it an approximation).
Entries that are not copies have no past. A first moment starts at zero. A second moment does not: the step count of its tensor
is large already, so that from zero Adam's first step would be (1 − β₁)/√(1 − β₂), about three, learning rates long, however
small the gradient. It starts at the mean of the existing entries.

Adafactor keeps only the row and column means r and c of a second moment, and takes r cᵀ / mean(r) for it. Each grows along its
own axis, and is multiplied by what the other one's mean has changed by. ASGD's average grows like the parameter. What is not in
the tables below is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from outgrow.apply import Edits, Journal, edits_by_tensor
from outgrow.errors import OptimizerError, Problem
from outgrow.fill import fill_moment, fill_values, grown
from outgrow.optimizers.lookup import state_shape as state_shape
from outgrow.optimizers.lookup import unfollowable as unfollowable
from outgrow.plan import Insertion, Plan
from outgrow.sandbox import tensors_of


@dataclass(frozen=True)
class Rule:
    """How something of a parameter's shape grows: like the `power`-th power of a gradient, new entries `fresh`."""

    power: int
    fresh: str


GRADIENT = Rule(1, "zero")
MAGNITUDE = Rule(1, "mean")
SQUARE = Rule(2, "mean")
UPDATE = Rule(0, "zero")
LENGTH = Rule(0, "mean")

RULES: dict[str, Rule] = {
    "exp_avg": GRADIENT,  # Adam and its kin
    "momentum_buffer": GRADIENT,  # SGD, Muon
    "grad_avg": GRADIENT,  # RMSprop, centred
    "prev": GRADIENT,  # Rprop
    "exp_avg_sq": SQUARE,
    "max_exp_avg_sq": SQUARE,
    "square_avg": SQUARE,  # RMSprop, Adadelta
    "sum": SQUARE,  # Adagrad
    "variance": SQUARE,  # Adafactor, of vectors
    "exp_inf": MAGNITUDE,  # Adamax
    "acc_delta": LENGTH,  # Adadelta: of updates, which do not depend on the scale of gradients
    "step_size": LENGTH,  # Rprop
}
BESIDE: dict[tuple[str, str], Rule] = {("momentum_buffer", "square_avg"): UPDATE}  # RMSprop gathers g / √square_avg
AVERAGES = frozenset({"ax"})
FACTORED = (("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col"))  # torch's Adafactor, Transformers' Adafactor
FACTORS = {key: -1 - side for pair in FACTORED for side, key in enumerate(pair)}  # the axis that each is the mean over

ANEW = "make a new optimizer after the growth"


def check_optimizers(optimizers: Sequence[Any], model: nn.Module, plan: Plan, olds: Mapping[int, Tensor] | None = None) -> None:
    """Raise one error with all reasons why optimizers can't follow a plan; changes nothing.

    Args:
        olds: the parameters before the growth, by id, if the plan has been carried out already.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    edits = edits_by_tensor(plan)
    problems: list[Problem] = []
    for optimizer in unwrapped(optimizers):
        kind = type(optimizer).__name__
        held = [parameter for parameter in held_by(optimizer) if id(parameter) in names]
        if not held:
            reason = "this optimizer belongs to another model: it holds none of this one's parameters"
            problems.append(Problem(kind, reason, f"pass the optimizer that was made from model.parameters(), or {ANEW}"))
        changed = [parameter for parameter in held if names[id(parameter)] in edits]
        if isinstance(optimizer, LBFGS) and changed and _stepped(optimizer):
            reason = "LBFGS remembers past steps as flat vectors over all parameters, which can't be grown"
            problems.append(Problem(kind, reason, f"leave it out and {ANEW}: torch.optim.LBFGS(model.parameters())"))
            continue
        for parameter in changed:
            shape = (parameter if olds is None else olds[id(parameter)]).shape
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                reason = _obstacle(key, value, shape)
                if reason:
                    problems.append(
                        Problem(names[id(parameter)], f"{kind}'s state {key!r} {reason}", f"leave it out and {ANEW}")
                    )
    if problems:
        raise OptimizerError("an optimizer can't follow the growth", problems)


@torch.no_grad()
def grow_optimizers(
    optimizers: Sequence[Any], model: nn.Module, plan: Plan, olds: Mapping[int, Tensor], journal: Journal
) -> None:
    """Grow the state of optimizers whose parameters have just grown; `olds` are the parameters before, by id."""
    check_optimizers(optimizers, model, plan, olds)
    tensors = tensors_of(model)
    names = {id(tensors[name]): name for name in edits_by_tensor(plan)}
    before = {name: olds[id(tensor)] for name, tensor in tensors.items()}
    edits = edits_by_tensor(plan)
    for optimizer in unwrapped(optimizers):
        averages = {name: optimizer.state.get(tensor, {}).get("ax", before[name]) for name, tensor in tensors.items()}
        for parameter in held_by(optimizer):
            state = optimizer.state.get(parameter)
            if not state or id(parameter) not in names:
                continue
            for key, value in _grown_state(state, parameter, edits[names[id(parameter)]], averages).items():
                journal.note(partial(state.__setitem__, key, state[key]))
                state[key] = value


def _grown_state(
    state: Mapping[str, Any], parameter: Tensor, edits: Edits, averages: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """New tensors for those of a parameter's state that have its shape, or are means of such a one."""
    result: dict[str, Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        if key in AVERAGES:
            result[key] = _grown_average(value.detach(), parameter, edits, averages)
        elif key in RULES:
            result[key] = _grown_moment(value.detach(), edits, _rule(key, state))
    for row, column in FACTORED:
        if row in state:
            result[row], result[column] = _grown_factors(state[row], state[column], parameter.ndim, edits)
    return result


def _rule(key: str, state: Mapping[str, Any]) -> Rule:
    return next((rule for (own, other), rule in BESIDE.items() if own == key and other in state), RULES[key])


def _grown_moment(old: Tensor, edits: Edits, rule: Rule) -> Tensor:
    new = grown(old, edits)
    fill_moment(new, old, edits, rule.power, rule.fresh)
    return new


def _grown_factors(row: Tensor, column: Tensor, ndim: int, edits: Edits) -> tuple[Tensor, Tensor]:
    """Means over the last and the last but one axis; some optimizers keep the axis that was averaged, some do not."""
    kept = row.ndim == ndim
    rows, columns = (row, column) if kept else (row.unsqueeze(-1), column.unsqueeze(-2))
    new_rows = _grown_factor(rows, columns, ndim - 1, edits)
    new_columns = _grown_factor(columns, rows, ndim - 2, edits)
    return (new_rows, new_columns) if kept else (new_rows.squeeze(-1), new_columns.squeeze(-2))


def _grown_factor(factor: Tensor, other: Tensor, averaged: int, edits: Edits) -> Tensor:
    """`averaged`: the axis over which this factor is a mean, and along which the other one varies."""
    here = [edit for edit in edits if isinstance(edit, Insertion) and edit.axis == averaged]
    if here:
        before, after = (t.mean(dim=averaged, keepdim=True) for t in (other, _grown_moment(other, here, SQUARE)))
        factor = factor * torch.where(before > 0, after / before, torch.ones_like(before))
    return _grown_moment(factor, [edit for edit in edits if edit not in here], SQUARE)


def _grown_average(old: Tensor, parameter: Tensor, edits: Edits, averages: Mapping[str, Tensor]) -> Tensor:
    """An average over the parameter's past: a network of its own, grown by the same plan.

    What the plan draws, the average takes from the grown parameter, which has been nowhere else yet.
    """
    new = grown(old, edits)
    fill_values(new, old, edits, averages, 0, {})
    drawn = grown(torch.zeros_like(old), edits)
    fill_values(drawn, old, [_marking(edit) for edit in edits if isinstance(edit, Insertion)], {}, 0, {})
    return torch.where(drawn > 0, parameter.detach().to(new), new)


def _marking(edit: Insertion) -> Insertion:
    """One for entries that are drawn, and for others what their source has."""
    fill = "one" if edit.fill == "free" or edit.noise else "copy"
    return replace(edit, fill=fill, signs=(1.0,) * len(edit.at), keep=(), noise=0.0)


def unwrapped(optimizers: Sequence[Any]) -> list[Optimizer]:
    """The optimizers that hold state, each once: trainers wrap theirs in an object with an attribute `optimizer`."""
    found: dict[int, Optimizer] = {}
    for given in optimizers:
        layers = [given]
        while (inner := getattr(layers[-1], "optimizer", None)) is not None and all(inner is not layer for layer in layers):
            layers.append(inner)
        real = [layer for layer in layers if isinstance(layer, Optimizer)]
        if not real:
            raise OptimizerError(f"{type(given).__name__} is no optimizer: pass a torch.optim.Optimizer, or a list of them")
        if any(type(layer).__name__ == "ZeroRedundancyOptimizer" for layer in layers):
            reason = "it shares parameters out over the ranks by their sizes, and each rank holds the state of its own alone"
            problem = Problem("ZeroRedundancyOptimizer", reason, f"leave it out and {ANEW}")
            raise OptimizerError("an optimizer can't follow the growth", [problem])
        found.update({id(layer.state): layer for layer in real})
    return list(found.values())


def held_by(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _stepped(optimizer: LBFGS) -> bool:
    return bool(optimizer.state) or getattr(optimizer, "_numel_cache", None) is not None


def expected_shape(key: str, value: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that a known key's tensor has for a parameter of that shape; None for an unknown key."""
    if key in FACTORS and len(shape) > 1:
        axis = len(shape) + FACTORS[key]
        middle = (1,) if value.ndim == len(shape) else ()
        return (*shape[:axis], *middle, *shape[axis + 1 :])
    return tuple(shape) if key in RULES or key in AVERAGES else None


def _obstacle(key: str, value: Any, shape: Sequence[int]) -> str:
    """Why a piece of state can't grow; empty if it can, or need not."""
    if not isinstance(value, Tensor):
        return "holds tensors inside a container, for which there is no rule" if _has_tensors(value) else ""
    expected = expected_shape(key, value, shape)
    found = tuple(value.shape)
    if expected is None:
        if not found or (value.numel() == 1 and found != tuple(shape)):
            return ""
        return f"of shape {found} is none that outgrow has a rule for"
    if found != expected:
        return f"has shape {found} where the parameter's makes it {expected}: it does not belong to this parameter as it was"
    return "" if value.layout == torch.strided else "is sparse"


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, Tensor) and value.ndim > 0


def adopt(
    optimizers: Sequence[Any], model: nn.Module, sources: Sequence[tuple[str, str]], journal: Journal
) -> list[tuple[nn.Parameter, nn.Parameter, str]]:
    """Give the parameters of new modules to the optimizers that hold those of the modules they are copies of.

    They join the same groups, in the order of `named_parameters()`, so that states keyed by position stay right; those of a
    module that is no copy go with the nearest before them of as many axes, and those beside frozen ones that no optimizer
    holds with the nearest that one does. They have no state yet: an optimizer makes it at its next step, as for any new
    parameter.

    sources: path of a new module, and of the one it is a copy of.
    Returns every new parameter with the one it goes with, and its name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    place = {key: index for index, key in enumerate(names)}
    trained = {id(p) for optimizer in unwrapped(optimizers) for p in held_by(optimizer)}
    twins: dict[int, list[nn.Parameter]] = {}
    for new, old in sources:
        originals = dict(model.get_submodule(old).named_parameters())
        for name, parameter in model.get_submodule(new).named_parameters():
            twin = originals.get(name)
            like = _nearest(model, parameter, new, [f"{path}." for path, _ in sources]) if twin is None else twin
            if not like.requires_grad and id(like) not in trained:
                near = [p for p in model.parameters() if id(p) in trained and p.requires_grad]
                gaps = [(p.ndim != parameter.ndim, abs(place[id(p)] - place[id(parameter)])) for p in near]
                like = near[gaps.index(min(gaps))] if near else like
            twins.setdefault(id(like), []).append(parameter)
    for optimizer in unwrapped(optimizers):
        if isinstance(optimizer, LBFGS) and _stepped(optimizer):
            reason = "LBFGS remembers past steps as flat vectors over all parameters, which can't be grown"
            problem = Problem("LBFGS", reason, f"leave it out and {ANEW}: torch.optim.LBFGS(model.parameters())")
            raise OptimizerError("an optimizer can't follow the growth", [problem])
        for group in optimizer.param_groups:
            held = group["params"]
            added = [twin for parameter in held for twin in twins.get(id(parameter), ())]
            ordered = [place.get(id(parameter), -1) for parameter in held]
            journal.note(partial(group.__setitem__, "params", held))
            if ordered == sorted(ordered):
                group["params"] = sorted([*held, *added], key=lambda parameter: place.get(id(parameter), -1))
            else:
                group["params"] = [p for parameter in held for p in (parameter, *twins.get(id(parameter), ()))]
            if "param_names" in group:
                known = dict(zip(map(id, held), group["param_names"], strict=True))
                journal.note(partial(group.__setitem__, "param_names", group["param_names"]))
                group["param_names"] = [names.get(id(p), known.get(id(p), "")) for p in group["params"]]
    likes = {id(parameter): parameter for parameter in model.parameters()}
    return [(new, likes[key], names[id(new)]) for key, news in twins.items() for new in news]


def thaw(model: nn.Module, sources: Sequence[tuple[str, str]]) -> bool:
    """Let new modules learn that are copies of frozen ones, of which not one parameter does; whether there were any."""
    frozen = False
    for path, _ in sources:
        own = [p for p in model.get_submodule(path).parameters() if p.is_floating_point() or p.is_complex()]
        if not any(parameter.requires_grad for parameter in own):
            frozen |= bool(own)
            for parameter in own:
                parameter.requires_grad_(True)
    return frozen


def _nearest(model: nn.Module, parameter: nn.Parameter, inside: str, new: Sequence[str]) -> nn.Parameter:
    """The parameter before a new module that is most like one of its own: of as many axes, or the last there is."""
    others = list(model.named_parameters())
    start = next(index for index, (name, _) in enumerate(others) if name.startswith(f"{inside}."))
    known = [(index, other) for index, (name, other) in enumerate(others) if not name.startswith(tuple(new))]
    before = [other for index, other in reversed(known) if index < start] or [other for _, other in known]
    return next((other for other in before if other.ndim == parameter.ndim), before[0])
