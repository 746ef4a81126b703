"""Plan the steps of a growth without changing the model.

Transforms are planned one after the other, each on the model after the ones before. To that end their steps are carried out on
trial: modules hold other tensors meanwhile, which share the memory of the model's own, and a journal undoes everything. A
growth by one transform needs no such trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.peft_adapters import obstacles
from outgrow.analysis.volumes import Anatomy
from outgrow.engine.carry_out import Work
from outgrow.errors import FIRST, MethodError, SelectionError
from outgrow.growth_plan.plan import Plan, renamed
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.sandbox import substituted, tensors_of
from outgrow.transforms.all_transforms import Kind, kinds
from outgrow.transforms.site_and_step import Site, Step, trial

T = TypeVar("T")


def steps_of(
    model: nn.Module, example: Example, transforms: Sequence[Any], seed: int, anatomy: Anatomy, journal: Journal
) -> list[Step]:
    """The steps of the transforms, in their order; the model itself does not change.

    anatomy: of the model before the growth. journal: undoes trials after an interrupt.
    """
    batches = list(_batches(transforms))
    try:
        if len(batches) == 1:
            ((kind, request),) = batches
            return [kind.plan(Site(model, example, seed, lambda: anatomy, journal), request)]
        return on_trial(model, journal, lambda tried: _in_turn(Work(model, [], [], example, tried), batches, seed, anatomy))
    except (MethodError, SelectionError) as error:
        more = obstacles(model)
        raise (type(error)(str(error).partition(FIRST)[0], [*error.problems, *more]) if more else error) from None


def _in_turn(work: Work, batches: Sequence[tuple[Kind, Any]], seed: int, anatomy: Anatomy) -> list[Step]:
    """Plan transforms, each on the model after the steps of the ones before. anatomy: of the model before all of them."""
    steps: list[Step] = []
    for kind, request in batches:
        if steps:
            work.carry_out(steps[-1])
        site = Site(work.model, work.example, seed, _reader(work, anatomy), work.journal)
        steps.append(kind.plan(site, _renamed(kind, request, work.plans)))
    return steps


def on_trial(model: nn.Module, outer: Journal, action: Callable[[Journal], T]) -> T:
    """The result of an action that changes a model; all changes are undone. outer: undoes them too, after an interrupt."""
    with substituted(model, aliases(model)), trial(outer) as journal:
        return action(journal)


def _batches(transforms: Sequence[Any]) -> Iterator[tuple[Kind, Any]]:
    """The transforms in the order in which they are planned; all requests of a kind that is planned `together` at once."""
    for kind in sorted(kinds(), key=lambda kind: kind.order):
        own = [transform for transform in transforms if isinstance(transform, kind.request)]
        if kind.together:
            yield from [(kind, own)] if own else []
        else:
            yield from ((kind, transform) for transform in own)


def _renamed(kind: Kind, request: Any, plans: Sequence[Plan]) -> Any:
    """A request with the name of its place after some plans. Kinds that are planned together select by pattern."""
    place = None if kind.together else getattr(request, kind.place)
    if not isinstance(place, str) or renamed(place, plans) == place:
        return request
    return replace(request, **{kind.place: renamed(place, plans)})


def _reader(work: Work, first: Anatomy) -> Callable[[], Anatomy]:
    """A function that analyses the present model. first: the analysis of the model before the growth."""
    if not work.plans:
        return lambda: first
    return lambda: dissect(work.model, work.example, both_modes=len(first.reading.trace.passes) > 1)


def aliases(model: nn.Module) -> dict[str, Tensor]:
    """New tensors that share the memory of a model's own: giving one of them another storage leaves the model's unchanged.

    `data` and not `detach()`, which would share the version counter with which autograd detects changed saved tensors.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model).items():
        alias = tensor.data
        found[name] = nn.Parameter(alias, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else alias
    return found
