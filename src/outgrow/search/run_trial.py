"""One trial: choose a parent, grow it, train it, and report the objectives."""

from __future__ import annotations

import contextlib
import random as python_random
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from outgrow.errors import SearchError
from outgrow.history.growth_order import histories_of
from outgrow.model.unwrap import as_list
from outgrow.saving.run_state import random_states, set_random_states
from outgrow.search.artifacts import GoneError, Models
from outgrow.search.description import Search
from outgrow.search.moves import Move
from outgrow.search.objectives import ReturnedError, measure
from outgrow.search.parents import SAMPLERS, Choice
from outgrow.search.records import Record, ancestors, complete
from outgrow.text.plurals import counted
from outgrow.text.terminal import line


def run_trial(search: Search, models: Models, trial: Any, records: Sequence[Record]) -> list[float]:
    """The values of a trial's objectives; what it did is in its attributes. The random state is as before afterwards."""
    before = random_states()
    try:
        return _run(search, models, trial, records)
    finally:
        set_random_states(before)


def _run(search: Search, models: Models, trial: Any, records: Sequence[Record]) -> list[float]:
    slot, start = int(trial.user_attrs["slot"]), time.perf_counter()
    random = Random(f"{search.seed} {slot}")
    seed = random.randrange(2**31)
    model, optimizer = _grown(search, models, trial, records, slot, random)
    trial.set_user_attr("seed", seed)
    for name in ("parameters", "flops"):
        trial.set_user_attr(name, int(measure(name, model, search.example)))
    _seed(seed)
    shapes, growths = _shapes(model), _growths(model)
    metrics = search.objectives.metrics_of(search.train(model, optimizer, trial))
    _check_kept(model, shapes, growths)
    values: list[float] = search.objectives.evaluate(model, search.example, metrics)
    trial.set_user_attr("metrics", metrics)
    trial.set_user_attr("artifact", models.save(model, optimizer, trial))
    trial.set_user_attr("seconds", round(time.perf_counter() - start, 3))
    return values


def _grown(
    search: Search, models: Models, trial: Any, records: Sequence[Record], slot: int, random: Random
) -> tuple[nn.Module, Any]:
    """The model that the trial trains: the search's parent itself, or the model of another trial, grown."""
    if slot == 0:
        _note(trial, None, [])
        return models.fresh()
    if "moves" in trial.user_attrs:  # a trial of a killed worker is taken up again
        with contextlib.suppress(GoneError):
            return _repeated(search, models, trial.user_attrs, records)
    choice, shrunk_from, (model, optimizer) = _chosen(search, models, records, slot, random)
    moves = search.space.sample(model, search.example, as_list(optimizer), random) if choice.grows else []
    _note(trial, choice.parent, moves, shrunk_from)
    return model, optimizer


def _repeated(search: Search, models: Models, attrs: Mapping[str, Any], records: Sequence[Record]) -> tuple[nn.Module, Any]:
    """The model of a trial that another worker has begun."""
    (parent,) = [record for record in records if record.number == attrs["parent"]]
    model, optimizer = models.load(parent)
    for facts in attrs["moves"]:
        Move.from_json(facts).carry_out(model, search.example, as_list(optimizer))
    return model, optimizer


def _chosen(
    search: Search, models: Models, records: Sequence[Record], slot: int, random: Random
) -> tuple[Choice, int | None, tuple[nn.Module, Any]]:
    """The parent with its model; another one if its artifact is gone, and an ancestor if the search shrinks back."""
    done = [record for record in complete(records) if record.slot >= 0]  # others are not of this search
    missing: list[GoneError] = []
    while done:
        choice = SAMPLERS[search.sampler](done, search.objectives, slot, search.population, random)
        parent, shrunk_from = choice.parent, None
        older = [one for one in ancestors(parent, records) if one in done]
        if choice.grows and older and random.random() < search.space.shrink:
            parent, shrunk_from = random.choice(older), parent.number
        try:
            found = Choice(parent, choice.grows), shrunk_from, models.load(parent)
        except GoneError as error:
            missing.append(error)
            done = [record for record in done if record != parent]
            continue
        if missing:
            others = f"; those of {counted(len(missing) - 1, 'other trial')} too" if len(missing) > 1 else ""
            line(f"{missing[0]}{others}: another parent is chosen")
        return found
    raise missing[0] if missing else SearchError("no trial is complete, so there is no parent to grow")


def _note(trial: Any, parent: Record | None, moves: Sequence[Move], shrunk_from: int | None = None) -> None:
    """Write what a trial does into its attributes; `moves` comes last, since it says that all are there."""
    trial.set_user_attr("parent", None if parent is None else parent.number)
    if shrunk_from is not None:
        trial.set_user_attr("shrunk_from", shrunk_from)
    trial.set_user_attr("growth", [str(move) for move in moves])
    trial.set_user_attr("moves", [move.to_json() for move in moves])


def _shapes(model: nn.Module) -> dict[str, Any]:
    return {name: value.shape for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _check_kept(model: nn.Module, before: Mapping[str, Any], growths: int) -> None:
    """Raise if training has changed the architecture by other means than growths: the model could not be loaded again."""
    now = _shapes(model)
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed and _growths(model) == growths:
        names = f"{changed[0]}{', …' if changed[1:] else ''}"
        raise ReturnedError(
            f"train has changed the architecture of its model ({names}), so that it can't be loaded again: train the model in "
            "place, and change a copy"
        )


def _growths(model: nn.Module) -> int:
    return sum(len(plans) for plans in histories_of(model).values())


def _seed(seed: int) -> None:
    python_random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
