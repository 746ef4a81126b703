"""Transforms from outside the package: `outgrow.register_transform`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from outgrow.errors import ApplyError, GrowthError, Problem
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.model.sandbox import tensors_of
from outgrow.transforms.all_transforms import LAST, REGISTERED, TABLE, Kind, kinds
from outgrow.transforms.site_and_step import Site, Step
from outgrow.wrong_arguments import usage

Planner = Callable[[Site, Any], Plan]


@usage("outgrow.register_transform(Vocabulary, plan_vocabulary)")
def register_transform(cls: type, planner: Planner, name: str = "", place: str = "", replace: bool = False) -> None:
    """Make a transform of your own usable in `outgrow.grow`, `outgrow.plan`, schedules, schedule files and saved runs.

    A transform is a request, an instance of `cls`, from which `planner` makes a plan. The growth does the rest: it carries the
    plan out on model, averaged copies and optimizers, compares outputs, and undoes everything on a failure. In a growth with
    several transforms, registered ones come last, in the order of their registration. A registration holds for the process;
    files of grown models can be read without it, since they contain plans.

    Args:
        cls: a frozen dataclass that checks its own fields.
        planner: called as `planner(site, request)`. The `site` has `model`, `example`, `seed` and `anatomy` (the volumes); the
            planner returns an `outgrow.extending.Plan` and does not change the model. Changes within `site.trial()` are
            undone. Refusals are raised as `outgrow.GrowthError`.
        name: the key in schedule files, e.g. `{ vocabulary = "embedding", by = 8 }`; by default the name of the class in lower
            case.
        place: the field that this key stands for, by default the first. If it is the path of a module, it is renamed when
            transforms before it move the module.
        replace: whether a transform that is registered under this name is replaced; refused otherwise.

    Example:
        >>> import outgrow, torch
        >>> from dataclasses import dataclass
        >>> from outgrow.extending import Change, Insertion, Plan, Setting, Site
        >>> @dataclass(frozen=True)
        ... class Vocabulary:
        ...     where: str
        ...     by: int
        >>> def plan_vocabulary(site: Site, request: Vocabulary) -> Plan:
        ...     old = site.model.get_submodule(request.where).num_embeddings
        ...     new = old + request.by
        ...     rows = Insertion(f"{request.where}.weight", 0, old, tuple(range(old, new)), (0,) * request.by, "zero")
        ...     setting = Setting(request.where, "num_embeddings", old, new)
        ...     return Plan((Change(request.where, old, new, "zero"),), (rows,), (setting,), site.seed)
        >>> register_transform(Vocabulary, plan_vocabulary)
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 2))
        >>> growth = outgrow.grow(model, torch.tensor([[1, 2]]), Vocabulary("0", by=6))
        >>> model[0]
        Embedding(16, 4)
    """
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        raise GrowthError(f"{cls!r} is no dataclass: pass the class itself, decorated by @dataclass(frozen=True)")
    parameters: Any = getattr(cls, "__dataclass_params__", None)
    if not parameters.frozen:
        raise GrowthError(f"{cls.__qualname__} can be changed after it was checked: decorate it by @dataclass(frozen=True)")
    if not callable(planner):
        raise GrowthError(f"planner={planner!r}: pass a function of a site and a request that returns a plan")
    fields = [field.name for field in dataclasses.fields(cls) if field.init]
    name, place = name or cls.__name__.lower(), place or next(iter(fields), "")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][\w-]*", name):
        raise GrowthError(f"name={name!r}: write a word of letters, digits, '_' and '-', e.g. 'vocabulary'")
    if place not in fields:
        raise GrowthError(f"place={place!r} is no field of {cls.__qualname__}: it has {', '.join(fields) or 'none'}")
    _check_conflicts(cls, name, [field for field in fields if field != place], replace)
    REGISTERED[name] = Kind(name, cls, place, lambda site, request: _checked(site, request, planner), LAST, inserts=True)


def _check_conflicts(cls: type, name: str, options: list[str], replace: bool) -> None:
    """Raise if a schedule file or a growth could confuse this transform with another one."""
    if any(kind.name == name or kind.request is cls for kind in TABLE):
        raise GrowthError(f"{name!r} is a transform of outgrow's own: choose another name, and a class of your own")
    there = REGISTERED.get(name)
    if there is not None and there.request is not cls and not replace:
        whose = f"{there.request.__module__}.{there.request.__qualname__}"
        raise GrowthError(f"{name!r} is registered already, for {whose}: register_transform(…, replace=True) replaces it")
    others = [kind for kind in kinds() if kind.name != name]
    near = [kind for kind in others if issubclass(cls, kind.request) or issubclass(kind.request, cls)]
    if near:
        whose = f"{near[0].request.__qualname__}, the class of {near[0].name!r}"
        raise GrowthError(f"{cls.__qualname__} is the same as, or derives from, {whose}: one class is one transform")
    taken = {field: kind.name for kind in others for field in kind.options}
    if name in taken:
        raise GrowthError(f"{name!r} is an option of {taken[name]!r}, and files could not tell them apart: choose another name")
    clashes = [option for option in options if option == name or any(kind.name == option for kind in others)]
    if clashes:
        raise GrowthError(f"the field {clashes[0]!r} of {cls.__qualname__} is the name of a transform in files: rename it")


def _checked(site: Site, request: Any, planner: Planner) -> Step:
    """The plan of a user's planner; refused unless it fits the model."""
    plan = planner(site, request)
    if not isinstance(plan, Plan):
        raise GrowthError(f"the planner of {type(request).__name__} returned {plan!r:.80}, and no outgrow.extending.Plan")
    if not plan.changes:
        raise GrowthError(f"the plan of {request!r} names no changes: add a Change, which reports and tables show")
    problems = [] if plan.inserts else _problems(site, plan)
    if problems:
        raise ApplyError(f"the plan of {request!r} does not fit the model", problems)
    return Step((plan,))


def _problems(site: Site, plan: Plan) -> list[Problem]:
    """Tensors and attributes that are missing, or differ from the plan's expectation."""
    problems: list[Problem] = []
    shapes = {name: list(tensor.shape) for name, tensor in tensors_of(site.model).items()}
    for edit in plan.edits:
        shape = shapes.get(edit.tensor)
        if shape is None:
            problems.append(Problem(edit.tensor, "the model has no such tensor"))
        elif isinstance(edit, Insertion) and (not 0 <= edit.axis < len(shape) or shape[edit.axis] != edit.size):
            expected = f"the plan expects size {edit.size} along axis {edit.axis}"
            problems.append(Problem(edit.tensor, f"its shape is {tuple(shape)}, and {expected}"))
        elif isinstance(edit, Insertion):
            if len(edit.at) != len(set(edit.at)) or not all(0 <= position < edit.new_size for position in edit.at):
                problems.append(Problem(edit.tensor, f"new positions at={edit.at!r:.60} do not lie in {edit.new_size} entries"))
            if len(edit.sources) != len(edit.at) or not all(0 <= source < edit.size for source in edit.sources):
                problems.append(Problem(edit.tensor, "sources= needs an old position for each new one"))
            shape[edit.axis] = edit.new_size
    modules = dict(site.model.named_modules(remove_duplicate=False))
    for setting in plan.settings:
        where = f"{setting.module}.{setting.name}".strip(".")
        if setting.module not in modules or setting.name not in vars(modules[setting.module]):
            problems.append(Problem(where, "the model has no such attribute"))
    return problems
