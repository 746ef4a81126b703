"""From transforms to steps: what a growth will do, found while the model stays as it is.

Transforms are planned one after the other, each on the model as those before it leave it. To that end their steps are carried
out on trial: modules hold other tensors meanwhile, which share the memory of the model's own, and a journal takes everything
back. A growth by one transform needs no such trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.volumes import Anatomy
from outgrow.engine.carry_out import Work
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
    """The steps that transforms take, in their order; the model is afterwards as it was.

    anatomy: the model's, as it is. journal: undoes trials that an interrupt left.
    """
    batches = list(_batches(transforms))
    if len(batches) == 1:
        ((kind, request),) = batches
        return [kind.plan(Site(model, example, seed, lambda: anatomy, journal), request)]
    return on_trial(model, journal, lambda tried: _in_turn(Work(model, [], [], example, tried), batches, seed, anatomy))


def _in_turn(work: Work, batches: Sequence[tuple[Kind, Any]], seed: int, anatomy: Anatomy) -> list[Step]:
    """Plan transforms, each on the model as the steps of those before it leave it. anatomy: of the model before all."""
    steps: list[Step] = []
    for kind, request in batches:
        if steps:
            work.carry_out(steps[-1])
        site = Site(work.model, work.example, seed, _reader(work, anatomy), work.journal)
        steps.append(kind.plan(site, _renamed(kind, request, work.plans)))
    return steps


def on_trial(model: nn.Module, outer: Journal, action: Callable[[Journal], T]) -> T:
    """The result of something that changes a model, which is afterwards as it was. outer: undoes it too, after an interrupt."""
    with substituted(model, aliases(model)), trial(outer) as journal:
        return action(journal)


def _batches(transforms: Sequence[Any]) -> Iterator[tuple[Kind, Any]]:
    """The transforms in the order in which they are planned; some kinds all at once."""
    for kind in sorted(kinds(), key=lambda kind: kind.order):
        own = [transform for transform in transforms if isinstance(transform, kind.request)]
        if kind.together:
            yield from [(kind, own)] if own else []
        else:
            yield from ((kind, transform) for transform in own)


def _renamed(kind: Kind, request: Any, plans: Sequence[Plan]) -> Any:
    """A request by the name that its place has after some plans. Kinds that are planned together select by pattern."""
    place = None if kind.together else getattr(request, kind.place)
    if not isinstance(place, str) or renamed(place, plans) == place:
        return request
    return replace(request, **{kind.place: renamed(place, plans)})


def _reader(work: Work, first: Anatomy) -> Callable[[], Anatomy]:
    """Reads the model as it is now; `first` is how it was before."""
    if not work.plans:
        return lambda: first
    return lambda: dissect(work.model, work.example, both_modes=len(first.reading.trace.passes) > 1)


def aliases(model: nn.Module) -> dict[str, Tensor]:
    """Other tensors with the memory of a model's own. One that gets another storage leaves the model's as it was.

    `data` and not `detach()`, which would share the count of changes by which autograd knows a saved tensor to be out of date.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors_of(model).items():
        alias = tensor.data
        found[name] = nn.Parameter(alias, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else alias
    return found
