"""The order of growths where a model and parts of it were grown separately.

Every grown module keeps its own growths, in order, with the names of that time. The order between growths of the whole model
and growths of its parts is stored nowhere. It is reconstructed from names and shapes alone, going back from the final ones: a
growth can have been the last if the tensors that it edited exist under these names and in these sizes, and if it inserted no
part that has growths left to undo. If several growths qualify, one of the whole model is tried first, and the others if that
leads to a contradiction.
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
Key = Hashable  # identifies a tensor
K = TypeVar("K", bound=Hashable)
Histories = Mapping[str, tuple[Plan, ...]]  # by the path of the module that was grown; "" is the model itself


@dataclass(frozen=True)
class GrowthStep:
    """A growth: the grown module's path now, its path at that time, and the plans, with names relative to the module."""

    place: str
    then: str
    plans: tuple[Plan, ...]

    def renamed(self, name: str, done: int = 0) -> str:
        """The name of a tensor or module after this growth. done: the number of the growth's plans that came before `name`."""
        own = inside(self.then, name)
        return name if own is None else joined_path(self.then, renamed(own, self.plans[done:]))


def histories_of(model: nn.Module) -> Histories:
    """Growths of the model, and of parts of it that were grown separately."""
    return {path: tuple(vars(module)[ATTRIBUTE]) for path, module in model.named_modules() if vars(module).get(ATTRIBUTE)}


def order_growths(names: Mapping[str, Key], shapes: Mapping[Any, Shape], histories: Histories) -> tuple[GrowthStep, ...] | None:
    """All growths, oldest first; None if they do not lead to these tensors.

    names: the tensor of each name; a tied tensor has several names. shapes: of each tensor.
    """
    left = {place: growths(plans) for place, plans in histories.items()}
    if len(left) == 1:
        return tuple(GrowthStep(place, place, plans) for place, made in left.items() for plans in made)
    found = _backwards(_NamesAndShapes(dict(names), dict(shapes), {place: place for place in left}), left, set())
    return None if found is None else tuple(reversed(found))


def order_growths_of(model: nn.Module, histories: Histories) -> tuple[GrowthStep, ...] | None:
    """All growths of a model that has been through these histories, oldest first; None if they do not lead to it."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    return order_growths({n: id(t) for n, t in tensors.items()}, {id(t): tuple(t.shape) for t in tensors.values()}, histories)


def present_name(name: str, steps: Sequence[GrowthStep], number: int, done: int) -> str:
    """The name after all steps of a tensor or module that had this name in step `number`, after `done` of its plans."""
    name = steps[number].renamed(joined_path(steps[number].then, name), done)
    for later in steps[number + 1 :]:
        name = later.renamed(name)
    return name


def undone(
    names: Mapping[str, K], place: str, plans: Sequence[Plan], back: Callable[[K, Insertion], bool]
) -> Mapping[str, K] | None:
    """The tensors by their names before a growth of `place`; None if this growth can't have been the last.

    back: called with a tensor and an insertion to undo, the latest first; returns False if the two do not fit each other.
    """
    for plan in reversed(plans):
        for edit in reversed(plan.edits):
            key = names.get(joined_path(place, edit.tensor))
            if key is None or (isinstance(edit, Insertion) and not back(key, edit)):
                return None
        names = {before: key for name, key in names.items() if (before := former(name, place, [plan])) is not None}
    return names


@dataclass(frozen=True, eq=False)
class _NamesAndShapes:
    """A model at some time in the past: names and shapes of its tensors, and the paths of its separately grown parts."""

    names: Mapping[str, Key]
    shapes: dict[Key, Shape]
    paths: dict[str, str]  # path today → path at that time

    def before(self, place: str, plans: Sequence[Plan], waiting: Sequence[str]) -> _NamesAndShapes | None:
        """The state before a growth; None if this growth can't have been the last. waiting: parts with growths left to undo."""
        shapes, where = dict(self.shapes), self.paths[place]

        def shrink(key: Key, edit: Insertion) -> bool:
            shape = list(shapes[key])
            fits = edit.axis < len(shape) and shape[edit.axis] == edit.new_size
            if fits:
                shape[edit.axis] = edit.size
                shapes[key] = tuple(shape)
            return fits

        names = undone(self.names, where, plans, shrink)
        paths = {other: former(path, where, plans) for other, path in self.paths.items()}
        if names is None or any(paths[other] is None for other in waiting):
            return None
        return _NamesAndShapes(names, shapes, {other: path or "" for other, path in paths.items()})


def _backwards(
    state: _NamesAndShapes, left: Mapping[str, Sequence[tuple[Plan, ...]]], dead: set[tuple[int, ...]]
) -> list[GrowthStep] | None:
    """Growths, the latest first. dead: numbers of growths left per module from which no order was found."""
    counts = tuple(map(len, left.values()))
    if counts in dead or not any(counts):
        return None if any(counts) else []
    for place, made in left.items():
        if made:
            waiting = [other for other, rest in left.items() if other != place and rest]
            before = state.before(place, made[-1], waiting)
            rest = None if before is None else _backwards(before, {**left, place: made[:-1]}, dead)
            if rest is not None:
                return [GrowthStep(place, state.paths[place], made[-1]), *rest]
    dead.add(counts)
    return None


def former(name: str, place: str, plans: Sequence[Plan]) -> str | None:
    """The name of a tensor or module before a growth of `place`; None if that growth added it."""
    own = inside(place, name)
    if own is None:
        return name
    for insert in (insert for plan in reversed(plans) for insert in reversed(plan.inserts)):
        own = insert.former(own) if own else own
    return None if own is None else joined_path(place, own)
