"""Check before training starts, while optimizer states are still empty, that the optimizers of a run can follow its growths.

The state of an optimizer is known from its class. An optimizer of an unknown class may have no state: then a stand-in of that
class makes a step on a parameter of its own, and its state is checked. The names of the parameters that will grow come from
the dry run of the schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.errors import OptimizerError, Problem
from outgrow.optimizers.grow_optimizers import refusal
from outgrow.optimizers.lookup import known, refused_setting, unfollowable, way_out
from outgrow.optimizers.restart import check_fresh, optimizer_settings, own_layers
from outgrow.optimizers.state_rules import PLAIN
from outgrow.optimizers.wrappers import NEW_ONE, held_by, unwrapped
from outgrow.runs.schedule import At, When
from outgrow.runs.timeline import Stage

IN_A_RUN = (
    "write state='fresh' in the events of the schedule, so that it starts again at each growth; or train with an optimizer "
    "whose state outgrow knows"
)


def check_following(optimizers: Sequence[Any], model: nn.Module, events: Sequence[At | When], stages: Sequence[Stage]) -> None:
    """Raise if an optimizer can't follow the growths of these events. stages: their stages in the dry run."""
    if any(event.state == "fresh" for event in events):
        check_fresh(optimizers)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    problems: dict[str, Problem] = {}
    for event, stage in zip(events, stages, strict=True):
        if event.state == "fresh":
            continue
        for given in optimizers:
            grown = [one for one in _held(given) if names.get(id(one)) in stage.tensors]
            if len(optimizers) == 1 or grown:
                for problem in (*_problems(given, stage), *_by_setting(given, grown)):
                    problems.setdefault(
                        f"{problem.where}: {problem.reason}", replace(problem, where=f"{event.time}, {problem.where}")
                    )
    if problems:
        raise OptimizerError("an optimizer can't follow the growths of the schedule", list(problems.values()))


@contextlib.contextmanager
def advised() -> Iterator[None]:
    """Replace the advice in errors to make a new optimizer, which is not possible within a run."""
    try:
        yield
    except OptimizerError as error:
        if not any(NEW_ONE in problem.instead for problem in error.problems):
            raise
        message = str(error).splitlines()[0]
        problems = [replace(problem, instead=problem.instead.replace(NEW_ONE, IN_A_RUN)) for problem in error.problems]
        raise type(error)(message, problems) from error


def _problems(given: Any, stage: Stage) -> Iterator[Problem]:
    if unfollowable(given) and not _is_stateless(given):
        for layer in own_layers(given):
            if reason := known(layer).refusal:
                yield Problem(type(layer).__name__, reason, way_out(layer).replace(NEW_ONE, IN_A_RUN))
        return
    for optimizer in unwrapped([given]):
        about = known(optimizer)
        words = [rule.word for rule in about.rules.values() if rule.kind in PLAIN]
        no_copies = about.no_copies or (f"their past gradients do not follow from its state ({words[0]})" if words else "")
        if no_copies and stage.copies:
            instead = f"a method that adds units without copying or rescaling (r2r, netmorph); or {IN_A_RUN}"
            yield Problem(type(optimizer).__name__, f"it can't follow units that are copied or rescaled: {no_copies}", instead)


def _by_setting(given: Any, grown: Sequence[Tensor]) -> Iterator[Problem]:
    """Problems with settings of the groups of parameters that grow, or that new ones join."""
    for optimizer in unwrapped([given]):
        for reason in filter(None, (refused_setting(optimizer, parameter) for parameter in grown)):
            yield Problem(type(optimizer).__name__, f"its state can't grow: {reason}", IN_A_RUN)


def _held(given: Any) -> list[Tensor]:
    return [parameter for one in unwrapped([given]) for parameter in held_by(one)]


def _is_stateless(given: Any) -> bool:
    """Whether steps of a stand-in create no state; False if no stand-in can be made."""
    try:
        (optimizer,) = unwrapped([given])
        parameter = nn.Parameter(torch.ones(2, 3))
        group = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "param_names")}
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            other = type(optimizer)([{**group, "params": [parameter]}], **optimizer_settings(optimizer))
            for _ in range(2):
                parameter.grad = torch.ones_like(parameter)
                other.step()
        return not any(other.state.values()) and refusal(other) is None and refusal(optimizer) is None
    except Exception:
        return False
