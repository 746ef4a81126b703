"""The one table of transforms, read by growths, schedules, schedule files and public calls.

A transform consists of a frozen dataclass, the request, and a function that plans it. Within one growth sizes are planned
first, then new modules, then the transforms added by `outgrow.register_transform`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outgrow.errors import GrowthError
from outgrow.requests import Branch, Deepen, Kernel, Widen
from outgrow.transforms.branch import branch_plan
from outgrow.transforms.deepen.plan_deepenings import deepen_plans
from outgrow.transforms.kernel import kernel_plan
from outgrow.transforms.site_and_step import Site, Step
from outgrow.transforms.widen.plan_widenings import widen_plan

Transform = Any  # an instance of a class in the table


@dataclass(frozen=True, eq=False)
class Kind:
    """One row of the table: a kind of transform.

    name: of the public call, and the key in schedule files. request: its class. place: the field that names the place; files
    give it as the value of the key. plan: from a request to a step; from all requests of a growth, if they are planned
    `together`. order: kinds with a low one are planned first. inserts: it may insert new modules. methods: its field `method`
    may hold an `outgrow.Method`.
    """

    name: str
    request: type
    place: str
    plan: Callable[[Site, Any], Step]
    order: int
    together: bool = False
    inserts: bool = False
    methods: bool = False

    @property
    def options(self) -> list[str]:
        """The fields besides the place."""
        kind: Any = self.request
        return [field.name for field in fields(kind) if field.init and field.name != self.place]


TABLE: tuple[Kind, ...] = (
    Kind("widen", Widen, "where", widen_plan, order=1, together=True, methods=True),
    Kind("deepen", Deepen, "after", deepen_plans, order=2, inserts=True),
    Kind("kernel", Kernel, "where", kernel_plan, order=0),
    Kind("branch", Branch, "beside", branch_plan, order=3, inserts=True),
)
LAST = 4  # the order of registered transforms
REGISTERED: dict[str, Kind] = {}  # by name; filled by `outgrow.register_transform`


def kinds() -> tuple[Kind, ...]:
    """All kinds of transforms."""
    return (*TABLE, *REGISTERED.values())


def kind_of(transform: Any) -> Kind | None:
    """The kind of a transform; None if the object is not a transform."""
    return next((kind for kind in kinds() if isinstance(transform, kind.request)), None)


def check_transforms(transforms: Sequence[Any]) -> None:
    """Raise if there are no transforms, or if one of the objects is not a transform."""
    if not transforms:
        raise GrowthError("nothing to do: pass at least one transform, e.g. outgrow.Widen('*', factor=1.5)")
    unknown = [transform for transform in transforms if kind_of(transform) is None]
    if unknown:
        raise GrowthError(no_transform(unknown[0]))


def no_transform(given: Any) -> str:
    """Why an object is no transform, and what to write instead."""
    if isinstance(given, (list, tuple)) and given and all(kind_of(one) is not None for one in given):
        kind = type(given).__name__
        return f"a {kind} of transforms is no transform: write a star before it, outgrow.grow(model, example, *transforms)"
    if hasattr(given, "events"):
        return "a schedule is no transform: pass it to outgrow.Run(model, example, optimizer, schedule)"
    return f"{given!r} is no transform: write e.g. outgrow.Widen('*', factor=1.5)"


def kept_outputs(transforms: Sequence[Any]) -> tuple[str | int, ...]:
    """The names of the outputs that a growth by these transforms preserves; empty if it preserves all of them."""
    return tuple(dict.fromkeys(name for transform in transforms if isinstance(transform, Widen) for name in transform.kept))


def described(transform: Any) -> str:
    """A transform as a short text: its property `summary`, or its place and the options that differ from their defaults."""
    summary, kind = getattr(transform, "summary", None), kind_of(transform)
    if isinstance(summary, str) or kind is None:
        return summary if isinstance(summary, str) else repr(transform)
    usual = {field.name: field.default for field in fields(transform)}
    values = {name: getattr(transform, name) for name in kind.options}
    options = [f"{name}={value!r}" for name, value in values.items() if value != usual[name]]
    return " ".join([type(transform).__name__, repr(getattr(transform, kind.place)), *options])
