"""Settle what grows and to which size, so that the model's own code agrees.

Requests choose volumes, sizes and methods. `fit` then finds the attributes that hold sizes. Where the code ties two volumes to one
ratio (attention that ends in `reshape(B, N, C)`), they are grown together to sizes that fit, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from outgrow.draft import Choice, make_plan
from outgrow.errors import ApplyError, MethodError, Problem
from outgrow.fit import Clash, Fitter, fit
from outgrow.paths import MoveEps
from outgrow.plan import Plan, Setting
from outgrow.predict import Prediction
from outgrow.reading import refs_in
from outgrow.trace import Example
from outgrow.transforms.widen import Skip, Widen, choose, is_glob, proportional
from outgrow.volumes import Anatomy, Volume

ATTEMPTS = 60


def settle(
    model: nn.Module, example: Example, anatomy: Anatomy, requests: Sequence[Widen], seed: int
) -> tuple[list[Choice], list[Skip], Plan]:
    """Choices and a plan under which the model runs, and what was left out."""
    choices: list[Choice] = []
    skipped: list[Skip] = []
    ratio: dict[str, float] = {}
    named: set[str] = set()
    for request in requests:
        chosen, left = choose(anatomy, request, choices)
        choices += chosen
        skipped += left
        for choice in chosen:
            ratio[choice.volume.name] = request.factor or 1 + choice.new / choice.volume.size
            if choice.volume.name in request.patterns and not any(is_glob(p) for p in request.patterns):
                named.add(choice.volume.name)
    fitter = Fitter(model, example, anatomy.reading.trace)
    tied: list[set[str]] = []
    for _ in range(ATTEMPTS):
        plan = make_plan(anatomy, choices, seed)
        try:
            plan = replace(plan, settings=tuple(_eps_settings(model, choices)))
        except _NoEps as missing:
            choices = _drop(choices, [missing.volume], skipped, named, missing.reason)
            continue
        settings, clash = fit(fitter, plan, Prediction(anatomy, choices))
        if clash is None:
            return choices, skipped, replace(plan, settings=tuple(settings))
        choices = _resolve(model, anatomy, choices, clash, tied, ratio, skipped, named)
    raise ApplyError("the model's code ties its sizes in ways that could not be settled: narrow where= down")


class _NoEps(Exception):
    def __init__(self, volume: Volume, reason: str) -> None:
        self.volume, self.reason = volume, reason


def _eps_settings(model: nn.Module, choices: Sequence[Choice]) -> list[Setting]:
    """Where norms keep their ε, and what it becomes."""
    values: dict[tuple[str, str], tuple[float, float]] = {}
    for choice in choices:
        done: set[tuple[str, str]] = set()
        for move in choice.verdict.eps:
            owner, name, old = _find_eps(model, move, choice.volume)
            if (owner, name) in done:
                continue
            done.add((owner, name))
            now = values.get((owner, name), (old, old))[1]
            values[owner, name] = old, now * move.ratio(choice.new) ** float(move.exponent)
    return [Setting(owner, name, old, new) for (owner, name), (old, new) in values.items()]


def _find_eps(model: nn.Module, move: MoveEps, volume: Volume) -> tuple[str, str, float]:
    path = move.module
    while True:
        module = model.get_submodule(path)
        for name, value in vars(module).items():
            if isinstance(value, float) and np.isclose(value, move.eps, rtol=1e-6, atol=0.0):
                return path, name, value
        if not path:
            raise _NoEps(volume, f"the norm in {move.module} keeps its ε = {move.eps:g} nowhere that it could be changed")
        path = path.rpartition(".")[0]


def _drop(
    choices: Sequence[Choice], volumes: Sequence[Volume], skipped: list[Skip], named: set[str], reason: str
) -> list[Choice]:
    names = {volume.name for volume in volumes}
    forced = names & named
    if forced:
        raise MethodError("a named volume can't grow by itself", [Problem(name, reason) for name in sorted(forced)])
    for volume in volumes:
        skipped.append(Skip(volume.name, volume.size, reason))
    rest = [choice for choice in choices if choice.volume.name not in names]
    if not rest:
        raise MethodError("nothing of what was selected can grow", [Problem(s.volume, s.reason) for s in skipped[:20]])
    return rest


def _resolve(
    model: nn.Module,
    anatomy: Anatomy,
    choices: list[Choice],
    clash: Clash,
    tied: list[set[str]],
    ratio: dict[str, float],
    skipped: list[Skip],
    named: set[str],
) -> list[Choice]:
    """Tie what meets at the clash to one ratio; if that was tried already, leave the innermost of it out."""
    groups = [_touching(anatomy, choices, path) for path in _like(model, anatomy, clash)]
    todo = [group for group in groups if len(group) > 1 and not any(set(group) <= known for known in tied)]
    if todo:
        for group in todo:
            merged = set(group)
            for known in [known for known in tied if known & merged]:
                merged |= known
                tied.remove(known)
            tied.append(merged)
        by_name = {choice.volume.name: choice for choice in choices}
        for group in tied:
            members = [by_name[name] for name in sorted(group) if name in by_name]
            if len(members) > 1:
                together = proportional(members, min(ratio[choice.volume.name] for choice in members))
                if together is None:
                    break
                by_name.update({choice.volume.name: choice for choice in together})
        else:
            return list(by_name.values())
    place = f"the code of {clash.module or 'the model'} does not follow its size ({clash.found})"
    at_clash = _at(anatomy, choices, clash.index)
    path = clash.module
    while not at_clash:
        at_clash = _touching(anatomy, choices, path) if path else [choice.volume.name for choice in choices]
        path = path.rpartition(".")[0]
    worst = set(at_clash)
    for group in groups:
        if set(group) & set(at_clash) or len(groups) > 1:
            inner = [name for name in group if name in at_clash] or group[:1]
            worst |= set(inner)
    sizes = {choice.volume.name: choice.volume for choice in choices}
    smallest = sorted(worst, key=lambda name: len(sizes[name].slots))
    few = [name for name in smallest if len(sizes[name].slots) == len(sizes[smallest[0]].slots)]
    return _drop(choices, [sizes[name] for name in few], skipped, named, place)


def _like(model: nn.Module, anatomy: Anatomy, clash: Clash) -> list[str]:
    """The clashing module and its sisters of the same class."""
    kind = type(model.get_submodule(clash.module))
    paths = dict.fromkeys(op.module for op in anatomy.reading.trace.ops)
    return [clash.module, *(p for p in paths if p != clash.module and clash.module and type(model.get_submodule(p)) is kind)]


def _touching(anatomy: Anatomy, choices: Sequence[Choice], path: str) -> list[str]:
    """Chosen volumes that any operator of a module (not of its children) touches."""
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
    families = {f for array in labels for f in np.unique(anatomy.family_of[anatomy.root[array]]).tolist()}
    found = []
    for choice in choices:
        if choice.volume.family in families:
            if any((anatomy.units(choice.volume, array) >= 0).any() for array in labels):
                found.append(choice.volume.name)
    return found
