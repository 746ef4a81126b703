"""Make a plan from a choice of volumes, sizes and methods: recipes for units become positions in tensors.

Volumes are planned one after the other, each on the shapes after the ones before: a sequence of exact steps is exact.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outgrow.analysis.labels import Labels
from outgrow.analysis.slot_positions import slot_ids, unit_runs
from outgrow.analysis.unit_states import Verdict
from outgrow.analysis.volumes import Anatomy, Slot, Volume
from outgrow.growth_plan.plan import Change, Edit, Insertion, Plan, Rescaling
from outgrow.methods.base import Draft, Init, Method, Recipe
from outgrow.methods.check_method import draft_by, recipe_by
from outgrow.methods.learned import LearnedInit, learned_name


@dataclass(frozen=True)
class Choice:
    """A volume, the number of units it gains, and the method."""

    volume: Volume
    new: int
    method: Method
    verdict: Verdict

    @property
    def spaced(self) -> bool:
        """Whether new units lie between the existing ones, as many behind each of them, instead of behind the last one."""
        return self.volume.rotary


def make_plan(anatomy: Anatomy, choices: Sequence[Choice], seed: int) -> Plan:
    """The plan with all insertions of all chosen volumes."""
    edits: list[Edit] = []
    born: dict[tuple[str, int], Labels] = {}  # for each current position, its original position, or −1 if it is new
    shared = _Shared()
    for choice in choices:
        edits.extend(_edits_of(anatomy, choice, seed, born, shared))
    changes = tuple(
        Change(
            c.volume.name,
            c.volume.size,
            c.volume.size + c.new * c.volume.grain,
            c.method.name,
            c.method.exact,
            c.verdict.stuck,
            c.volume.kind,
        )
        for c in choices
    )
    return Plan(changes, tuple(edits), seed=seed)


def draft_of(choice: Choice, seed: int) -> Draft:
    """The draft of a choice, which depends on the seed and the volume alone."""
    volume = choice.volume
    rng = np.random.default_rng(zlib.crc32(f"{seed}/{volume.name}/{volume.count}".encode()))
    return draft_by(choice.method, volume, choice.verdict, choice.new, rng)


class _Shared:
    """Positions and factors as tuples, one per content: layers of the same sizes have the same ones, and many of them."""

    def __init__(self) -> None:
        self._tuples: dict[tuple[str, bytes], tuple[Any, ...]] = {}

    def __call__(self, values: NDArray[Any]) -> tuple[Any, ...]:
        key = values.dtype.str, values.tobytes()
        if key not in self._tuples:
            self._tuples[key] = tuple(values.ravel().tolist())
        return self._tuples[key]


def _edits_of(anatomy: Anatomy, choice: Choice, seed: int, born: dict[tuple[str, int], Labels], shared: _Shared) -> list[Edit]:
    volume, method, verdict = choice.volume, choice.method, choice.verdict
    drafted = draft_of(choice, seed)
    slots: dict[tuple[str, int], Slot] = {}
    for slot in sorted(volume.slots, key=lambda slot: slot.role == "writes"):
        before = slots.get((slot.tensor, slot.axis))
        if before is None or slot.role != "scales":  # a tied tensor is filled as a writer, else as a reader
            slots[slot.tensor, slot.axis] = slot
    edits: list[Edit] = []
    for slot in slots.values():
        if slot.role == "reads" and (slot.tensor, slot.axis) not in verdict.readers:
            slot = replace(slot, role="scales")  # whole groups of a grouped layer: no sum runs over them
        recipe = recipe_by(method, slot, volume, verdict, drafted)
        if slot.role == "writes" and verdict.readers.get((slot.tensor, slot.axis)) == "zero":
            recipe = Recipe("zero", drafted.models)
        now = born.setdefault((slot.tensor, slot.axis), np.arange(anatomy.origin[slot.tensor, slot.axis].size))
        original = slot_ids(anatomy, volume, slot)
        for number, mine, special in _pieces(slot, unit_runs(original, volume.count), recipe, choice):
            ids = np.where(now >= 0, original[np.maximum(now, 0)], -1)
            edit, after = _insertion(slot, len(ids), unit_runs(ids, volume.count)[number][mine], special, choice, shared)
            now = np.where(after >= 0, now[np.maximum(after, 0)], -1)
            edits.append(edit)
        born[slot.tensor, slot.axis] = now
    for rescale in verdict.rescales:
        power = rescale.ratio(choice.new) ** float(rescale.exponent)
        edits.append(Rescaling(rescale.tensor, rescale.factor or power, rescale.offset))
    return edits


def _pieces(slot: Slot, tables: list[Labels], recipe: Recipe, choice: Choice) -> Iterator[tuple[int, Labels, Recipe]]:
    """One insertion for runs of one length and one recipe: the number of the table, its runs, and the recipe.

    Rows of keys and queries that meet in a product over the units have their own recipes (see `exactness/score_features.py`).
    """
    for number, table in enumerate(tables):
        if not choice.verdict.scores:
            yield number, np.arange(len(table)), recipe
            continue
        recipes: dict[Recipe, list[int]] = {}
        for run, first in enumerate(table[:, 0, 0].tolist()):
            own = _of_scores(slot, first, recipe, choice) if slot.role != "reads" else recipe
            recipes.setdefault(own, []).append(run)
        for own, runs in recipes.items():
            yield number, np.array(runs), own


def _of_scores(slot: Slot, position: int, recipe: Recipe, choice: Choice) -> Recipe:
    """The recipe of a run of rows that starts at a position."""
    here = slot.tensor, slot.axis
    for scores in choice.verdict.scores:
        if any((tensor, axis) == here and position in positions for tensor, axis, positions in scores.zeroed):
            if scores.offset:
                return Recipe("one", recipe.models, signs=(-scores.offset,) * choice.new)
            return Recipe("zero", recipe.models)
        if any((tensor, axis) == here and position in positions for tensor, axis, positions in scores.kept):
            factor, count = scores.factor(choice.new), choice.volume.count
            return replace(recipe, keep=(factor,) * count, gradient_keep=(1 / factor,) * count) if factor != 1 else recipe
    return recipe


def _insertion(
    slot: Slot, size: int, table: Labels, recipe: Recipe, choice: Choice, shared: _Shared
) -> tuple[Insertion, Labels]:
    """The insertion for runs of one slot; also, for each position after it, the position before (−1 if new).

    size: of the axis. table: positions by run, unit and offset.
    """
    count, units, length = table.shape
    ends = table[:, :, -1].reshape(-1) if choice.spaced else table[:, -1, -1]
    block = (choice.new // units if choice.spaced else choice.new) * length
    after = np.insert(np.arange(size), np.repeat(ends + 1, block), -1)
    at = np.flatnonzero(after < 0)
    models = np.array(recipe.models, dtype=np.int64)
    sources = table[:, models, :].reshape(-1)

    def spread(per_unit: Sequence[float]) -> tuple[float, ...]:
        return shared(np.broadcast_to(np.array(per_unit)[None, :, None], (count, len(per_unit), length)))

    draws: tuple[int, ...] = ()
    if recipe.draws:
        per_run = max(recipe.draws) + 1
        grid = np.array(recipe.draws)[None, :, None] * length + np.arange(length)[None, None, :]
        grid = grid + (np.arange(count) * per_run * length)[:, None, None]
        draws = shared(grid)
    members = table.reshape(-1)
    init = _init_name(choice.method.init, slot)
    edit = Insertion(
        tensor=slot.tensor,
        axis=slot.axis,
        size=size,
        at=shared(at),
        sources=shared(sources),
        fill=recipe.fill,
        draws=draws,
        signs=spread(recipe.signs) if recipe.signs else (),
        members=shared(members),
        runs=count,
        length=length,
        weights=recipe.weights,
        keep=spread(recipe.keep) if recipe.keep else (),
        gradient=spread(recipe.gradient) if recipe.gradient else (),
        gradient_keep=spread(recipe.gradient_keep) if recipe.gradient_keep else (),
        init=init if choice.method.scale == 1.0 else f"{init}*{choice.method.scale!r}",
        noise=choice.method.noise,
        fade=recipe.fade,
    )
    return edit, after


def _init_name(init: Init, slot: Slot) -> str:
    """The name of an init in a plan: what users passed, or where the function or the learned values are found."""
    if isinstance(init, LearnedInit):
        return learned_name(init, slot.tensor, slot.axis)
    return init if isinstance(init, str) else f"@{id(init)}"


def inits_of(choices: Sequence[Choice]) -> Mapping[str, Callable[..., Tensor]]:
    """The functions that users passed as `init`, by their names in the plan."""
    return {f"@{id(c.method.init)}": c.method.init for c in choices if not isinstance(c.method.init, (str, LearnedInit))}
