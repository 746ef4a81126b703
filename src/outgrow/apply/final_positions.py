"""Positions of a tensor's entries after all of its edits, computed once per plan.

The same edits act on a parameter, on its gradient and on each tensor of its optimizer state. Whatever depends on the edits
alone is therefore computed once and kept with them: final positions, and the slices that move existing entries there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outgrow.growth_plan.plan import Edit, Insertion, Plan, Rescaling

CACHE = "_edits_by_tensor"  # attribute of a plan
FEW_SLICES = 16  # up to this number along an axis, slices are faster than one copy by index
Positions = NDArray[np.int64]
GaplessRun = tuple[int, int, int]  # positions without a gap: where they start in the list, the first one, how many
SliceMove = tuple[tuple[int, int, int, int], ...]  # for each axis that grows: axis, start before, start after, how many
DrawRun = tuple[int, int, int, float]  # neighbouring draws: the first one, the position it goes to, how many, their sign
Shape = tuple[int, ...]
Span = tuple[int, int]  # positions without a gap: the first one, how many


class TensorEdits(tuple[Edit, ...]):
    """All edits of one tensor, in order, with the positions and slices that follow from them."""

    @cached_property
    def places(self) -> tuple[FinalPlace, ...]:
        """For each edit, the final positions of its new entries and of the existing ones, after all later edits."""
        places: list[FinalPlace] = []
        final: dict[int, Positions] = {}  # by axis
        for edit in reversed(self):
            if not isinstance(edit, Insertion):
                places.append(FinalPlace(edit, np.arange(0), np.arange(0)))
                continue
            at = ascending(edit.at)
            old = np.ones(edit.new_size, dtype=np.bool_)
            old[at] = False
            kept = np.flatnonzero(old)
            if edit.axis in final:
                at, kept = final[edit.axis][at], final[edit.axis][kept]
            places.append(FinalPlace(edit, at, kept))
            final[edit.axis] = kept
        return tuple(reversed(places))

    @cached_property
    def plain(self) -> bool:
        """Whether no new entry is a copy of an existing one, and gradients of all entries change by one factor at most."""
        insertions = self[:-1] if self and isinstance(self[-1], Rescaling) else self
        return all(isinstance(edit, Insertion) and not (edit.gradient or edit.gradient_keep) for edit in insertions)

    @cached_property
    def factor(self) -> float:
        """The factor of a rescaling after all insertions; one if there is none."""
        return self[-1].factor if self and isinstance(self[-1], Rescaling) else 1.0

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The final size of each axis that grows."""
        return {edit.axis: edit.new_size for edit in self if isinstance(edit, Insertion)}

    def shape_from(self, shape: Shape) -> Shape:
        """The shape after all edits of a tensor that has this shape before."""
        if shape not in self._shapes:
            self._shapes[shape] = tuple(max(size, self.sizes.get(axis, 0)) for axis, size in enumerate(shape))
        return self._shapes[shape]

    @cached_property
    def _shapes(self) -> dict[Shape, Shape]:
        """A cache: moments mostly have the shape of their parameter."""
        return {}

    @cached_property
    def where(self) -> Mapping[int, Positions]:
        """For each axis that grows, the final positions of the entries from before the growth."""
        found: dict[int, Positions] = {}
        for edit, place in zip(self, self.places, strict=True):
            if isinstance(edit, Insertion):
                found.setdefault(edit.axis, place.kept)
        return found

    @cached_property
    def moves(self) -> tuple[SliceMove, ...] | None:
        """The slices that bring existing entries to their places; None if there are too many of them."""
        axes = {axis: gapless_runs(positions) for axis, positions in self.where.items()}
        if any(len(found) > FEW_SLICES for found in axes.values()):
            return None
        return tuple(product(*([(axis, *run) for run in found] for axis, found in axes.items())))


@dataclass(frozen=True, eq=False)
class FinalPlace:
    """Final positions of an insertion's new entries (`at`), and of the entries before it (`kept`); both ascend."""

    edit: Edit
    at: Positions
    kept: Positions

    @cached_property
    def sources(self) -> Positions:
        """For each new entry, the final position of its source."""
        found: Positions = self.kept[np.array(self._insertion.sources)]
        return found

    @cached_property
    def members(self) -> Positions:
        """The final positions of the volume's existing entries."""
        found: Positions = self.kept[ascending(self._insertion.members)]
        return found

    @property
    def _insertion(self) -> Insertion:
        assert isinstance(self.edit, Insertion)
        return self.edit

    @cached_property
    def span(self) -> Span | None:
        """The positions of the new entries, if they follow each other without a gap."""
        return (int(self.at[0]), len(self.at)) if is_range(self.at) else None

    @cached_property
    def drawing(self) -> Drawing:
        """The layout of drawn values, for an insertion that draws."""
        draws, signs = np.array(self._insertion.draws), np.array(self._insertion.signs)
        count = int(draws.max()) + 1
        plain = bool((draws[:count] == np.arange(count)).all() and (signs[:count] == 1.0).all())
        done = count if plain and is_range(self.at[:count]) else 0
        return Drawing(self.at, draws, signs, count, done)


@dataclass(frozen=True, eq=False)
class Drawing:
    """New entry k, at position `at[k]`, is `signs[k]` times draw `draws[k]`, of `count` draws.

    The first `direct` entries are a slice of plain draws: these are drawn in place.
    """

    at: Positions
    draws: Positions
    signs: NDArray[np.float64]
    count: int
    direct: int

    @cached_property
    def first(self) -> int:
        """The position of the first entry."""
        return int(self.at[0])

    @cached_property
    def rest(self) -> list[DrawRun]:
        """Runs of the entries behind the direct ones."""
        return self.runs_from(self.direct)

    def runs_from(self, start: int) -> list[DrawRun]:
        """Runs of neighbouring entries, from `start` on, that take neighbouring draws with the same sign."""
        jumps = (np.diff(self.at) != 1) | (np.diff(self.draws) != 1) | (np.diff(self.signs) != 0)
        bounds = [start, *(b for b in (np.flatnonzero(jumps) + 1).tolist() if b > start), len(self.at)]
        return [(int(self.draws[a]), int(self.at[a]), b - a, float(self.signs[a])) for a, b in pairwise(bounds) if a < b]


def edits_of(edits: Sequence[Edit]) -> TensorEdits:
    return edits if isinstance(edits, TensorEdits) else TensorEdits(edits)


def edits_by_tensor(plan: Plan) -> Mapping[str, TensorEdits]:
    """The edits of each tensor, in order. They are cached on the plan, which is frozen and carried out more than once."""
    cache: dict[str, Any] = vars(plan)
    if CACHE not in cache:
        found: dict[str, list[Edit]] = defaultdict(list)
        for edit in plan.edits:
            found[edit.tensor].append(edit)
        cache[CACHE] = {name: TensorEdits(edits) for name, edits in found.items()}
    result: Mapping[str, TensorEdits] = cache[CACHE]
    return result


def prepare(plan: Plan) -> None:
    """Compute positions ahead of the growth, to make the growth itself faster."""
    for edits in edits_by_tensor(plan).values():
        _ = edits.moves, edits.plain, edits.factor, [place.span for place in edits.places if len(place.at)]
        _ = [place.drawing.rest for place in edits.places if isinstance(place.edit, Insertion) and place.edit.draws]


def gapless_runs(positions: Positions) -> list[GaplessRun]:
    """Split ascending positions into runs without a gap."""
    if is_range(positions):
        return [(0, int(positions[0]), len(positions))]
    bounds = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return [(start, int(positions[start]), end - start) for start, end in pairwise(bounds) if start < end]


def is_range(positions: Positions) -> bool:
    """Whether ascending positions follow each other without a gap."""
    return int(positions[-1]) - int(positions[0]) == len(positions) - 1


def ascending(positions: Sequence[int]) -> Positions:
    if positions[-1] - positions[0] == len(positions) - 1:
        return np.arange(positions[0], positions[-1] + 1)
    return np.array(positions)
