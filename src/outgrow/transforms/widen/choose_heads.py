"""Choose between the two ways to add heads where query heads share keys and values.

With K key heads and G query heads for each of them, H = K·G query heads can become more in two ways:

    "group"   another key head and value head with G query heads: H grows by G, and so do K and its parameters by one head
    "query"   another query head for every key head:              H grows by K, and the key and value heads stay

Sizes count query heads, so a request names a number that one of them reaches, or both, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from outgrow.analysis.attention_products import GROUP, HEADS, QUERY
from outgrow.analysis.volumes import Volume
from outgrow.errors import Problem, SelectionError, SizeError
from outgrow.methods.all_methods import candidates
from outgrow.requests import Widen
from outgrow.transforms.widen.make_plan import Choice

ADDS = {GROUP: "whole groups of query heads with their key and value head", QUERY: "query heads in each group"}

Selected = tuple[Volume, bool]  # with whether it was named exactly
Chooser = Callable[[Volume], tuple[Choice | None, str]]  # raises a SizeError if its sizes do not fit


@dataclass(frozen=True)
class _Offer:
    """A volume with its choice of size and method; None if it can't grow, or not to the size."""

    selected: Selected
    choice: Choice | None
    misfit: SizeError | None = None


def one_form(request: Widen, found: Sequence[Selected], choose: Chooser) -> tuple[list[Selected], list[SizeError]]:
    """The selected volumes, of volumes of heads that exclude each other only one; also, errors where no size fits."""
    if request.kind != HEADS:
        return list(found), []
    kept: list[Selected] = []
    errors: list[SizeError] = []
    for rivals in _rivals(_of_unit(request, found)):
        offers = [_offer(selected, choose) for selected in rivals] if len(rivals) > 1 else [_Offer(rivals[0], None)]
        if len(offers) > 1 and all(offer.misfit for offer in offers):
            errors.append(_no_size(request, [volume for volume, _ in rivals]))
        else:
            kept.append(min(offers, key=lambda offer: _distance(request, offer)).selected)  # of equals, the first
    return kept, errors


def _of_unit(request: Widen, found: Sequence[Selected]) -> list[Selected]:
    """The volumes whose units have the requested form; a head that shares nothing is a group by itself."""
    if request.unit is None:
        return list(found)
    kept = [(volume, exact) for volume, exact in found if (volume.form or GROUP) == request.unit]
    if kept:
        return kept
    units = {f"one unit of {volume.name} is {volume.unit or 'one head'}" for volume, _ in found[:1]}
    way_out = "leave unit= out" + ("" if request.unit == GROUP else ", which adds heads with a key and value head of their own")
    raise SelectionError(
        f"no volume of kind 'heads' grows by {ADDS[request.unit]} (unit={request.unit!r})",
        [Problem("", unit, way_out) for unit in units],
    )


def _rivals(found: Sequence[Selected]) -> list[list[Selected]]:
    """Volumes that share units with the first of their list, in order."""
    result: list[list[Selected]] = []
    for volume, exact in found:
        for others in result:
            if volume.form and np.intersect1d(others[0][0].classes, volume.classes).size:
                others.append((volume, exact))
                break
        else:
            result.append([(volume, exact)])
    return result


def _offer(selected: Selected, choose: Chooser) -> _Offer:
    try:
        return _Offer(selected, choose(selected[0])[0])
    except SizeError as misfit:
        return _Offer(selected, None, misfit)


def _distance(request: Widen, offer: _Offer) -> float:
    """How far the size of a choice is from the requested one; infinite if there is none."""
    if offer.choice is None:
        return math.inf
    volume = offer.choice.volume
    return abs(volume.size + offer.choice.new * volume.grain - _wanted(request, volume))


def _wanted(request: Widen, volume: Volume) -> float:
    if request.factor is not None:
        return round(volume.size * request.factor, 6)
    return request.to if request.to is not None else volume.size + (request.by or 0)


def _no_size(request: Widen, volumes: Sequence[Volume]) -> SizeError:
    """The error that names the possible numbers of query heads."""
    size, wanted = volumes[0].size, int(_wanted(request, volumes[0]))
    least = min(method.step for method in candidates(request.method, request.fade))
    steps = {volume.form: least * volume.grain for volume in volumes}
    if wanted <= size:
        return SizeError(f"{volumes[0].name} has {size} query heads already: to={request.to} would not grow it")
    low = max(size + (wanted - size) // step * step for step in steps.values())
    high = min(size - (size - wanted) // step * step for step in steps.values())
    near = f"number is {high}" if low == size else f"numbers are {low} and {high}"
    ways = ", ".join(f"{ADDS[form]} add {step} at a time (unit={form!r})" for form, step in steps.items())
    return SizeError(f"{volumes[0].name} can't grow from {size} to {wanted} query heads: {ways}; the nearest possible {near}")
