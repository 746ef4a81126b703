"""Find volumes and new sizes with which the model's own code runs.

Requests choose volumes, sizes and methods. `fit` then finds the attributes that hold sizes. If the code ties two volumes to one
ratio (attention that ends in `reshape(B, N, C)`), they grow together to sizes that fit, or not at all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx, nn

from outgrow.analysis.unit_states import State
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.errors import ApplyError
from outgrow.exactness.scale_equations import Payment
from outgrow.growth_plan.plan import Plan, Setting
from outgrow.model.example import Example
from outgrow.model.walk_modules import module_at
from outgrow.requests import Skip, Widen
from outgrow.trace.operators import refs_in
from outgrow.transforms.widen.choose_volumes import choose, proportional, requested
from outgrow.transforms.widen.fit_attributes import Clash, Fitter, fit
from outgrow.transforms.widen.group_sizes import group_settings
from outgrow.transforms.widen.make_plan import Choice, make_plan
from outgrow.transforms.widen.new_outputs import size_settings
from outgrow.transforms.widen.norm_epsilon import find_eps, no_eps
from outgrow.transforms.widen.predict_shapes import Prediction
from outgrow.transforms.widen.regrow_folds import fold_settings
from outgrow.transforms.widen.rotary_pairs import NoTable, with_tables
from outgrow.transforms.widen.writers_pay import payments

ATTEMPTS = 60
SUSPECTS = 6  # volumes at a clash that are left out in turn, to find the one that causes it


def settle(
    model: nn.Module, example: Example, anatomy: Anatomy, requests: Sequence[Widen], seed: int
) -> tuple[list[Choice], list[Skip], Plan]:
    """Choices and a plan with which the model runs, and the skipped volumes."""
    fitter = Fitter(model, example, anatomy.reading.trace)
    barred: dict[str, str] = {}
    without: dict[tuple[str, State], str] = {}
    paying: dict[str, Payment] = {}
    tied: list[set[str]] = []
    literal: set[int] = set()
    following: set[int] = set()
    for _ in range(ATTEMPTS):
        choices, skipped = _choose(anatomy, requests, barred, without, paying)
        choices = [_with_literals(choice, literal) for choice in choices]
        choices, broken = _tie(choices, tied, requests)
        if broken:
            barred.update(dict.fromkeys(broken, "no size suits both it and the volumes that the code ties it to"))
            continue
        plan = make_plan(anatomy, choices, seed)
        try:
            plan = replace(plan, settings=tuple(_more_settings(model, anatomy, choices, seed)))
        except _NoEps as missing:
            name = missing.choice.volume.name
            without[name, missing.choice.method.state] = missing.reason
            if name not in paying:
                paying.update(payments(model, example, anatomy, choices, plan, forced=[name]))
            continue
        settings, clash = fit(fitter, plan, Prediction(anatomy, choices))
        if clash is None:
            plan = replace(plan, settings=tuple(settings))
            more = payments(model, example, anatomy, [choice for choice in choices if choice.volume.name not in paying], plan)
            if more:
                paying.update(more)
                continue
            try:
                return choices, skipped, with_tables(model, choices, plan)
            except NoTable as missing:
                barred[missing.volume] = missing.reason
                continue
        if clash.scalar is not None and clash.index in literal:  # a sister module has a number in its place, and this one not
            literal.remove(clash.index)
            following.add(clash.index)
        elif numbers := _literals(model, anatomy, choices, clash) - following:
            literal |= numbers
        elif not _tighten(model, anatomy, choices, clash, tied):
            barred.update(_blame(model, anatomy, choices, clash, fitter))
    raise ApplyError("no sizes were found with which the model's code runs: select fewer volumes with where=")


def _choose(
    anatomy: Anatomy,
    requests: Sequence[Widen],
    barred: dict[str, str],
    without: dict[tuple[str, State], str],
    paying: dict[str, Payment],
) -> tuple[list[Choice], list[Skip]]:
    choices: list[Choice] = []
    skipped: list[Skip] = []
    for request in requests:
        chosen, left = choose(anatomy, request, choices, barred, without, paying)
        choices += chosen
        skipped += left
    return choices, skipped


def _literals(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], clash: Clash) -> set[int]:
    """Operators that scale scores by a number in the code, here and in sister modules, if that is what the clash is about.

    A scale that the code computes from the size of a head follows a growth. A number in the code, such as `* 0.125`, stays.
    """
    scalars = Prediction(anatomy, choices).scalars
    if clash.scalar is None or clash.index not in scalars or not math.isclose(clash.scalar[0], scalars[clash.index][0]):
        return set()
    alike, value = set(_like(model, anatomy, clash)), scalars[clash.index][0]
    ops = anatomy.reading.trace.ops
    return {index for index, (old, _) in scalars.items() if ops[index].module in alike and math.isclose(old, value)}


def _with_literals(choice: Choice, literal: set[int]) -> Choice:
    """A choice in which some scales of scores stay as they are, so that no rows of q make up for them."""
    if not any(scalar.op in literal for scores in choice.verdict.scores for scalar in scores.scalars) or choice.volume.rotary:
        return choice
    scores = [
        replace(one, scalars=tuple(scalar for scalar in one.scalars if scalar.op not in literal))
        for one in choice.verdict.scores
    ]
    return replace(choice, verdict=replace(choice.verdict, scores=scores))


def _tie(choices: list[Choice], tied: Sequence[set[str]], requests: Sequence[Widen]) -> tuple[list[Choice], list[str]]:
    """Choices with fitting sizes for volumes that the code ties to one ratio; also, volumes for which there are none."""
    by_name = {choice.volume.name: choice for choice in choices}
    for group in tied:
        members = [by_name[name] for name in sorted(group) if name in by_name]
        if len(members) < 2:
            continue
        ratio = min(_ratio(choice, requests) for choice in members)
        together = proportional(members, ratio)
        if together is None:
            largest = max(members, key=lambda choice: len(choice.volume.slots))
            return choices, [choice.volume.name for choice in members if choice is not largest]
        by_name.update({choice.volume.name: choice for choice in together})
    return list(by_name.values()), []


def _ratio(choice: Choice, requests: Sequence[Widen]) -> float:
    """The requested growth factor of a volume, or else that of its choice."""
    factors = [request.factor for request in requests if request.factor and requested(choice.volume, request)]
    return factors[0] if factors else 1 + choice.new / choice.volume.count


def _more_settings(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], seed: int) -> Iterator[Setting]:
    """Settings besides those that the shapes of tensors show: ε of norms, folds, numbers of outputs, sizes of groups."""
    yield from _eps_settings(model, choices)
    yield from fold_settings(model, anatomy, choices, seed)
    yield from size_settings(model, choices)
    yield from group_settings(model, choices)


class _NoEps(Exception):
    """The ε of a norm has to change, and no attribute holds it."""

    def __init__(self, choice: Choice, reason: str) -> None:
        self.choice, self.reason = choice, reason


def _eps_settings(model: nn.Module, choices: Sequence[Choice]) -> list[Setting]:
    """Settings for the attributes in which norms keep their ε."""
    values: dict[tuple[str, str], tuple[float | None, float]] = {}
    for choice in choices:
        done: set[tuple[str, str]] = set()
        for move in choice.verdict.eps:
            found = find_eps(model, move)
            if found is None:
                raise _NoEps(choice, no_eps(move))
            key = found.module, found.name
            if key in done:
                continue
            done.add(key)
            now = values.get(key, (found.value, move.eps))[1]
            values[key] = found.value, now * move.ratio(choice.new) ** float(move.exponent)
    return [Setting(owner, name, old, new) for (owner, name), (old, new) in values.items()]


def _tighten(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], clash: Clash, tied: list[set[str]]) -> bool:
    """Tie the volumes at a clash, and at the same place of sister modules, to one ratio; returns whether any tie is new.

    These are the volumes of the operator, and volumes of its module whose size appears there; if they are tied already, all
    volumes of the module.
    """
    ops: dict[str, list[int]] = defaultdict(list)
    for op in anatomy.reading.trace.ops:
        ops[op.module].append(op.index)
    place = ops[clash.module].index(clash.index)
    sisters = [path for path in _like(model, anatomy, clash) if place < len(ops[path])]
    changed = False
    for near in (True, False):
        for path in sisters:
            touching = _touching(anatomy, choices, path)
            group = set(_meeting(anatomy, choices, ops[path][place], touching) if near else touching)
            if len(group) < 2 or any(group <= known for known in tied):
                continue
            for known in [known for known in tied if known & group]:
                group |= known
                tied.remove(known)
            tied.append(group)
            changed = True
        if changed:
            return True
    return False


def _meeting(anatomy: Anatomy, choices: Sequence[Choice], index: int, touching: Sequence[str]) -> list[str]:
    """Chosen volumes at an operator, and volumes of its module whose size is that of an axis there."""
    reading = anatomy.reading
    op = reading.trace.ops[index]
    shown = {
        reading.trace.values[value].shape[axis]
        for value in (*op.outputs, *(ref.value for ref in op.refs))
        for block in reading.layouts[value]
        for axis in block.axes
    }
    here = _at(anatomy, choices, index)
    by_name = {choice.volume.name: choice.volume for choice in choices}
    return [*here, *(name for name in touching if name not in here and by_name[name].size in shown)]


def _blame(model: nn.Module, anatomy: Anatomy, choices: Sequence[Choice], clash: Clash, fitter: Fitter) -> dict[str, str]:
    """Volumes to leave out, and why: the smallest at the clash, or near it, without which the run gets further."""
    at_clash = _at(anatomy, choices, clash.index)
    path = clash.module
    near = _touching(anatomy, choices, path)
    while not near:
        path = path.rpartition(".")[0]
        near = _touching(anatomy, choices, path) if path else [choice.volume.name for choice in choices]
    by_name = {choice.volume.name: choice.volume for choice in choices}
    sisters = [_touching(anatomy, choices, sister) for sister in _like(model, anatomy, clash)[1:]]
    reason = f"the code of {clash.module or 'the model'} does not follow its size ({clash.found})"
    if isinstance(module_at(model, clash.module), fx.GraphModule):
        reason += "; torch.fx has written that code for these sizes, as e3nn does for its irreps: build the layer again, wider"
    tries: list[set[str]] = []
    for name in sorted(near, key=lambda name: (name not in at_clash, len(by_name[name].slots))):
        shape = _fingerprint(by_name[name])
        alike = {other for other in near if _fingerprint(by_name[other]) == shape}
        group = alike | {other for names in sisters for other in names if _fingerprint(by_name[other]) == shape}
        if group not in tries:
            tries.append(group)
    for group in tries[:SUSPECTS]:
        rest = [choice for choice in choices if choice.volume.name not in group]
        if not rest:
            continue
        plan = make_plan(anatomy, rest, 0)
        plan = replace(plan, settings=(*_eps_settings(model, rest), *fold_settings(model, anatomy, rest, 0)))
        later = fit(fitter, plan, Prediction(anatomy, rest), past=clash.index)[1]
        if later is None or later.index > clash.index:
            return dict.fromkeys(sorted(group), reason)
    return dict.fromkeys(sorted(tries[0]), reason)


def _fingerprint(volume: Volume) -> tuple[tuple[str, int, str], ...]:
    """The slots by the last part of their names, which are equal for volumes of sister modules."""
    return tuple((slot.tensor.rpartition(".")[0].rpartition(".")[2], slot.axis, slot.role) for slot in volume.slots)


def _like(model: nn.Module, anatomy: Anatomy, clash: Clash) -> list[str]:
    """The path of the clashing module, then those of its sisters of the same class."""
    kind = type(module_at(model, clash.module))
    paths = dict.fromkeys(op.module for op in anatomy.reading.trace.ops)
    return [clash.module, *(p for p in paths if p != clash.module and clash.module and type(module_at(model, p)) is kind)]


def _touching(anatomy: Anatomy, choices: Sequence[Choice], path: str) -> list[str]:
    """Chosen volumes at any operator of a module or its children (of the whole model: without its children)."""
    names: dict[str, None] = {}
    prefix = f"{path}." if path else ""
    for op in anatomy.reading.trace.ops:
        if op.module == path or (prefix and op.module.startswith(prefix)):
            names.update(dict.fromkeys(_at(anatomy, choices, op.index)))
    return list(names)


def _at(anatomy: Anatomy, choices: Sequence[Choice], index: int) -> list[str]:
    """Chosen volumes that change a size at an operator."""
    op = anatomy.reading.trace.ops[index]
    values = [*op.outputs, *(ref.value for ref in refs_in((op.args, op.kwargs)))]
    labels = [block.labels for value in values for block in anatomy.reading.layouts[value]]
    here = {anatomy.volumes[number].name for array in labels for number in anatomy.volumes_by_label.of(array)}
    return [choice.volume.name for choice in choices if choice.volume.name in here]
