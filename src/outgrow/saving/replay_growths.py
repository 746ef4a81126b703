"""Give a newly built model the shapes and settings of a growth history, but not its values.

The values come from a file (see `saving/save_load.py`), so no random values are drawn and no outputs are compared. All sizes
that plans expect are checked before a tensor changes, and a journal can undo everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.apply.apply_plan import apply_setting
from outgrow.apply.fold_skips import apply_grafts
from outgrow.apply.insert_modules import apply_insert
from outgrow.errors import CheckpointError, Problem
from outgrow.growth_plan.plan import Insertion, Plan, Setting
from outgrow.history.growth_order import GrowthStep, Histories, Shape, histories_of, order_growths, present_name
from outgrow.history.growths_on_model import ATTRIBUTE, growths
from outgrow.model.journal import Journal
from outgrow.model.module_paths import joined_path
from outgrow.model.sandbox import tensors_of

BUFFER = "outgrow.buffer/"  # prefix in files of the names of buffers outside the state dict
SHOWN = 5  # problems listed in one error
FRESH = "build the model as it was before its first growth, with the same arguments, and load into that"


def refuse(message: str, problems: Sequence[Problem], instead: str = "") -> None:
    """Raise if there are problems, with the first few and the way out."""
    if problems:
        more = [Problem("", f"and {len(problems) - SHOWN} more")] if len(problems) > SHOWN else []
        raise CheckpointError(message + (f": {instead}" if instead else ""), [*problems[:SHOWN], *more])


def replay(model: nn.Module, histories: Histories, final: Mapping[str, Shape], misfit: str, journal: Journal) -> set[int]:
    """Carry out the growths of the histories that the model has not been through; new values stay uninitialised.

    final: final shapes of the state dict, and of the buffers outside it (`BUFFER`): if the model has them already, only its
        settings change.
    misfit: the beginning of error messages.
    Returns the ids of the tensors with new storage.
    """
    steps = _in_order(histories, final)
    done = _done(model, steps, misfit)
    kept = {name: shape for name, shape in final.items() if not name.startswith(BUFFER)}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    made: set[int] = set()
    problems: list[Problem] = []
    if all(shapes.get(name) == shape for name, shape in kept.items()):
        for number, step in enumerate(steps):
            for behind, plan in enumerate(step.plans, 1) if number not in done else ():
                now = partial(present_name, steps=steps, number=number, done=behind)
                renewed = [replace(setting, module=now(setting.module)) for setting in plan.settings]
                grafts = [replace(graft, block=now(graft.block), module=now(graft.module)) for graft in plan.grafts]
                as_now = replace(plan, settings=tuple(renewed), grafts=tuple(grafts))
                problems += _make_settings(model, "", as_now, journal, check=False)
    else:
        grown, problems = _final_shapes(model, [step for number, step in enumerate(steps) if number not in done], journal)
        if problems:
            known = {problem.where for problem in problems}
            refuse(misfit, [*problems, *_unmatched(model.state_dict(), kept, known)], FRESH)
        for tensor in tensors_of(model).values():
            if tuple(tensor.shape) != grown[id(tensor)]:
                _reshape(tensor, grown[id(tensor)], journal)
                made.add(id(tensor))
    refuse(misfit, problems, FRESH)
    for place, plans in histories.items():
        attributes = vars(model.get_submodule(place))
        journal.note(partial(_restore_history, attributes, attributes.get(ATTRIBUTE)))
        attributes[ATTRIBUTE] = plans
    return made


def _in_order(histories: Histories, final: Mapping[str, Shape]) -> tuple[GrowthStep, ...]:
    """The growths in order of time; if the order is not known, growths of parts first: sizes are checked later."""
    shapes = {name.removeprefix(BUFFER): shape for name, shape in final.items()}
    found = order_growths({name: name for name in shapes}, shapes, histories)
    parts = sorted(histories, key=len, reverse=True)
    return (
        tuple(GrowthStep(place, place, plans) for place in parts for plans in growths(histories[place]))
        if found is None
        else found
    )


def _done(model: nn.Module, steps: Sequence[GrowthStep], misfit: str) -> set[int]:
    """Numbers of the growths that a model has been through; CheckpointError if it has been through others."""
    done: set[int] = set()
    for place, plans in histories_of(model).items():
        for made in growths(plans):
            same = [n for n, step in enumerate(steps) if n not in done and step.plans == made]
            if not same:
                raise CheckpointError(f"{misfit}: {place or 'the model'} has already grown in another way: {FRESH}")
            done.add(min(same, key=lambda n: place not in (steps[n].then, steps[n].place)))
    return done


def _restore_history(attributes: dict[str, Any], before: tuple[Plan, ...] | None) -> None:
    attributes.pop(ATTRIBUTE)
    if before is not None:
        attributes[ATTRIBUTE] = before


def _unmatched(here: Collection[str], there: Collection[str], known: Collection[str]) -> list[Problem]:
    """Tensors that only the model or only the file has."""
    missing = [Problem(name, "the model has no such tensor") for name in there if name not in here and name not in known]
    return missing + [Problem(name, "the file has no such tensor") for name in here if name not in there]


def _final_shapes(model: nn.Module, left: Sequence[GrowthStep], journal: Journal) -> tuple[dict[int, Shape], list[Problem]]:
    """Shapes after the growths, by tensor, or why a plan does not fit. Modules are inserted and attributes set meanwhile."""
    shapes = {id(tensor): tuple(tensor.shape) for tensor in tensors_of(model).values()}
    for place, plan in ((step.then, plan) for step in left for plan in step.plans):
        after, problems = _tried(model, place, plan, shapes, journal)
        if problems:
            return shapes, problems
        shapes.update(after)
    return shapes, []


def _tried(
    model: nn.Module, place: str, plan: Plan, shapes: Mapping[int, Shape], journal: Journal
) -> tuple[dict[int, Shape], list[Problem]]:
    """Shapes after a plan, or why it does not fit; its modules are inserted and its attributes set."""
    known = dict(shapes)
    for insert in plan.inserts:
        where = joined_path(place, insert.container)
        try:
            part = model.get_submodule(place)
            container = part.get_submodule(insert.container)
            children = [container] if insert.wraps else list(container.children())
            source = None if insert.made else children[insert.copy_of]
        except (AttributeError, IndexError):
            return {}, [Problem(where, "the model has no such module, or not that many blocks in it")]
        new = apply_insert(part, insert, journal)
        twins = tensors_of(new if source is None else source).values()
        known.update(
            {id(t): known.get(id(twin), tuple(t.shape)) for t, twin in zip(tensors_of(new).values(), twins, strict=True)}
        )
    after, problems = _after(model, place, plan, known)
    if not problems:
        problems = _make_settings(model, place, plan, journal, check=True)
    return {**known, **after}, problems


def _after(model: nn.Module, place: str, plan: Plan, shapes: Mapping[int, Shape]) -> tuple[dict[int, Shape], list[Problem]]:
    """The shapes that a plan's edits change, or why they do not fit."""
    after: dict[int, Shape] = {}
    problems: dict[str, Problem] = {}
    try:
        tensors = tensors_of(model.get_submodule(place))
    except AttributeError:
        return after, [Problem(place, "the model has no such module")]
    for edit in plan.edits:
        name = joined_path(place, edit.tensor)
        if edit.tensor not in tensors:
            problems.setdefault(name, Problem(name, "the model has no such tensor"))
        elif isinstance(edit, Insertion):
            key = id(tensors[edit.tensor])
            shape = list(after.get(key, shapes[key]))
            if not 0 <= edit.axis < len(shape) or shape[edit.axis] != edit.size:
                reason = f"it is {tuple(shape)} in the model; the history grows it from {edit.size} along axis {edit.axis}"
                problems.setdefault(name, Problem(name, reason))
            else:
                shape[edit.axis] = edit.new_size
                after[key] = tuple(shape)
    return after, list(problems.values())


@torch.no_grad()
def _reshape(tensor: Tensor, shape: Shape, journal: Journal) -> None:
    """Give a tensor a new storage and shape; it stays the same object. Its gradient would not fit, and is deleted."""
    old = tensor.detach()
    channels_last = old.ndim == 4 and not old.is_contiguous() and old.is_contiguous(memory_format=torch.channels_last)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    new = torch.empty(shape, dtype=old.dtype, device=old.device, memory_format=memory)
    journal.note(partial(_put, tensor, old, tensor.grad if tensor.is_leaf else None))
    _put(tensor, new, None)


@torch.no_grad()
def _put(tensor: Tensor, value: Tensor, gradient: Tensor | None) -> None:
    tensor.grad = None
    tensor.set_(value)  # type: ignore[call-overload]
    tensor.grad = gradient


def _make_settings(model: nn.Module, place: str, plan: Plan, journal: Journal, check: bool) -> list[Problem]:
    """Set the attributes of a plan; with `check`, each must have its value from before the growth."""
    problems: list[Problem] = []
    part = model.get_submodule(place)
    apply_grafts(part, plan, journal)
    for setting in plan.settings:
        where = joined_path(place, setting.module, setting.name)
        found, now = _current(part, setting)
        if not found:
            problems.append(Problem(where, "the model has no such attribute"))
        elif check and _alike(now) != _alike(setting.old):
            problems.append(Problem(where, f"it is {now!r} in the model and was {setting.old!r} before the growth"))
        else:
            apply_setting(part, replace(setting, new=_of_kind(setting.new, now)), journal)
    return problems


def _current(model: nn.Module, setting: Setting) -> tuple[bool, Any]:
    """Whether the attribute exists, and its value."""
    try:
        value: Any = vars(model.get_submodule(setting.module))[setting.name]
        if setting.item is not None:
            value = value[setting.item] if hasattr(value, "__getitem__") else getattr(value, str(setting.item), None)
        return True, value
    except (AttributeError, LookupError, TypeError):
        return False, None


def _alike(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else value


def _of_kind(value: Any, now: Any) -> Any:
    """Convert a sequence to the type of the present value: JSON does not distinguish torch.Size, tuple and list."""
    both = isinstance(value, (tuple, list)) and type(now) in (tuple, list, torch.Size)
    return type(now)(value) if both else value
