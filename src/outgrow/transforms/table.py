"""The one table of transforms, read by growths, schedules and schedule files.

A transform is a frozen dataclass that says what is requested, and a function that plans it. Rows stand in the order in which
their transforms are planned within one growth: sizes first, then new modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outgrow.errors import GrowthError
from outgrow.transforms.branch import Branch, branch_plan
from outgrow.transforms.deepen import Deepen, deepen_plans
from outgrow.transforms.kernel import Kernel, kernel_plan
from outgrow.transforms.site import Site, Step
from outgrow.transforms.widen import Widen
from outgrow.transforms.widen_plan import widen_plan


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of transform.

    name: of the public call, and the key in schedule files. request: its class. place: the field that names the place; in files
    the key stands for it. plan: from a request to a step. together: all requests of a growth are planned at once.
    """

    name: str
    request: type
    place: str
    plan: Callable[[Site, Any], Step]
    together: bool = False


TABLE: tuple[Kind, ...] = (
    Kind("kernel", Kernel, "where", kernel_plan),
    Kind("widen", Widen, "where", widen_plan, together=True),
    Kind("deepen", Deepen, "after", deepen_plans),
    Kind("branch", Branch, "beside", branch_plan),
)


def kind_of(transform: Any) -> Kind | None:
    """The row of a transform; None if it is none."""
    return next((kind for kind in TABLE if isinstance(transform, kind.request)), None)


def check_transforms(transforms: Sequence[Any]) -> None:
    """Raise if there is nothing to do, or something that is no transform."""
    if not transforms:
        raise GrowthError("nothing to do: pass at least one transform, e.g. outgrow.Widen('*', factor=1.5)")
    strangers = [transform for transform in transforms if kind_of(transform) is None]
    if strangers:
        raise GrowthError(f"{strangers[0]!r} is no transform: write e.g. outgrow.Widen('*', factor=1.5)")
