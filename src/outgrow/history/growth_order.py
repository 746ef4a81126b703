"""In which order growths came, where a model and parts of it were grown each by themselves.

Every module that was grown remembers its own growths, in order, by the names of that time; how those of the whole and of its
parts follow on each other is nowhere written. It is found on paper, going back from the names and shapes of the end: a growth
can have been the last if what it edited is there under these names and in these sizes, and no part with growths still to be
undone came with it. Where several can, the whole's counts as the later one; a way that leads nowhere is left for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from outgrow.growth_plan.plan import Insertion, Plan, renamed
from outgrow.history.growths_on_model import ATTRIBUTE, growths
from outgrow.model.module_paths import inside, joined_path

Shape = tuple[int, ...]
Key = Hashable  # what tells one tensor from another
K = TypeVar("K", bound=Hashable)
Histories = Mapping[str, tuple[Plan, ...]]  # by the path of the module that was grown; "" is the model itself


@dataclass(frozen=True)
class GrowthStep:
    """A growth: the path that the grown module has now, the one that it had then, and the plans, by names within it."""

    place: str
    then: str
    plans: tuple[Plan, ...]

    def renamed(self, name: str, done: int = 0) -> str:
        """What something of the model is called after this growth; `done`: of whose plans so many are carried out."""
        own = inside(self.then, name)
        return name if own is None else joined_path(self.then, renamed(own, self.plans[done:]))


def histories_of(model: nn.Module) -> Histories:
    """Growths of the model, and of parts of it that were grown by themselves."""
    return {path: tuple(vars(module)[ATTRIBUTE]) for path, module in model.named_modules() if vars(module).get(ATTRIBUTE)}


def chronicle(names: Mapping[str, Key], shapes: Mapping[Any, Shape], histories: Histories) -> tuple[GrowthStep, ...] | None:
    """All growths, oldest first; None if they do not lead to these tensors.

    names: which tensor is called what; a tied one has several. shapes: of each tensor.
    """
    left = {place: growths(plans) for place, plans in histories.items()}
    if len(left) == 1:
        return tuple(GrowthStep(place, place, plans) for place, made in left.items() for plans in made)
    found = _backwards(_Paper(dict(names), dict(shapes), {place: place for place in left}), left, set())
    return None if found is None else tuple(reversed(found))


def chronicle_of(model: nn.Module, histories: Histories) -> tuple[GrowthStep, ...] | None:
    """The same of a model that has been through these growths."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return chronicle({n: id(t) for n, t in tensors.items()}, {id(t): tuple(t.shape) for t in tensors.values()}, histories)


def called_now(name: str, steps: Sequence[GrowthStep], number: int, done: int) -> str:
    """What something is called after all steps that was called so within step `number`, after `done` of its plans."""
    name = steps[number].renamed(joined_path(steps[number].then, name), done)
    for later in steps[number + 1 :]:
        name = later.renamed(name)
    return name


def undone(
    names: Mapping[str, K], place: str, plans: Sequence[Plan], back: Callable[[K, Insertion], bool]
) -> Mapping[str, K] | None:
    """What tensors were called before a growth of `place`; None if it can't have been the last.

    back: takes an insertion back, the latest first, of a tensor; False if it does not fit that.
    """
    for plan in reversed(plans):
        for edit in reversed(plan.edits):
            key = names.get(joined_path(place, edit.tensor))
            if key is None or (isinstance(edit, Insertion) and not back(key, edit)):
                return None
        names = {before: key for name, key in names.items() if (before := former(name, place, [plan])) is not None}
    return names


@dataclass(frozen=True, eq=False)
class _Paper:
    """A model on its way back: what its tensors were called, their sizes, and where the parts were."""

    names: Mapping[str, Key]
    shapes: dict[Key, Shape]
    now: dict[str, str]

    def before(self, place: str, plans: Sequence[Plan], waiting: Sequence[str]) -> _Paper | None:
        """Before a growth; None if that can't have been the last. waiting: parts with growths that are still to be undone."""
        shapes, where = dict(self.shapes), self.now[place]

        def shrink(key: Key, edit: Insertion) -> bool:
            shape = list(shapes[key])
            fits = edit.axis < len(shape) and shape[edit.axis] == edit.new_size
            if fits:
                shape[edit.axis] = edit.size
                shapes[key] = tuple(shape)
            return fits

        names = undone(self.names, where, plans, shrink)
        now = {other: former(path, where, plans) for other, path in self.now.items()}
        if names is None or any(now[other] is None for other in waiting):
            return None
        return _Paper(names, shapes, {other: path or "" for other, path in now.items()})


def _backwards(
    paper: _Paper, left: Mapping[str, Sequence[tuple[Plan, ...]]], dead: set[tuple[int, ...]]
) -> list[GrowthStep] | None:
    """Growths, the latest first. dead: how many were left of each where no way led on."""
    counts = tuple(map(len, left.values()))
    if counts in dead or not any(counts):
        return None if any(counts) else []
    for place, made in left.items():
        if made:
            waiting = [other for other, rest in left.items() if other != place and rest]
            before = paper.before(place, made[-1], waiting)
            rest = None if before is None else _backwards(before, {**left, place: made[:-1]}, dead)
            if rest is not None:
                return [GrowthStep(place, paper.now[place], made[-1]), *rest]
    dead.add(counts)
    return None


def former(name: str, place: str, plans: Sequence[Plan]) -> str | None:
    """What something was called before a growth of `place`; None if it came with it."""
    own = inside(place, name)
    if own is None:
        return name
    for insert in (insert for plan in reversed(plans) for insert in reversed(plan.inserts)):
        own = insert.former(own) if own else own
    return None if own is None else joined_path(place, own)
