"""Check the properties and results of a method, so that a mistake in it is reported with its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Slot, Volume
from outgrow.errors import GrowthError, MethodError
from outgrow.growth_plan.plan import FILL_NAMES
from outgrow.methods.base import Draft, Method, Recipe, forced

DRAWN = ("free", "spread")  # fills that need draws and signs


def check_method(method: Method) -> None:
    """Check the name, state and step of an instance."""
    kind = type(method).__qualname__
    for attribute in ("name", "state", "step", "exact"):
        try:
            value = getattr(method, attribute)
        except GrowthError:
            raise
        except Exception as error:
            raise MethodError(f"method {kind}: its {attribute} raised {type(error).__name__}: {error}") from error
        if attribute == "name" and (not isinstance(value, str) or not value.strip() or "\n" in value):
            raise MethodError(f"method {kind}: its name is {value!r}; it must be one line of text")
        if attribute == "state" and (not isinstance(value, State) or value is State.CONST):
            known = ", ".join(f"State.{state.name}" for state in State if state is not State.CONST)
            raise MethodError(f"method {kind}: its state is {value!r}; it must be one of {known}")
        if attribute == "step" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise MethodError(f"method {kind}: its step is {value!r}; new units come in multiples of a whole number above 0")


def draft_by(method: Method, volume: Volume, verdict: Verdict, new: int, rng: np.random.Generator) -> Draft:
    """A method's draft for a volume, checked."""
    place = f"{_title(method)}: draft for {volume.name}"
    try:
        draft = method.draft(volume, verdict, new, rng)
    except GrowthError:
        raise
    except Exception as error:
        raise MethodError(f"{place} raised {type(error).__name__}: {error}") from error
    if not isinstance(draft, Draft):
        raise MethodError(f"{place} returned {type(draft).__name__}: it must return a Draft")
    if draft.new != new:
        raise MethodError(f"{place} is for {draft.new!r} new units; it must be for {new}, as many as it was given")
    _check_units(place, "models", draft.models, new, volume.count)
    return draft


def recipe_by(method: Method, slot: Slot, volume: Volume, verdict: Verdict, draft: Draft) -> Recipe:
    """A method's recipe for a slot, checked."""
    place = f"{_title(method)}: recipe for {slot.tensor}, axis {slot.axis} ({slot.role})"
    try:
        recipe = method.recipe(slot, volume, verdict, draft)
    except GrowthError:
        raise
    except Exception as error:
        raise MethodError(f"{place} raised {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise MethodError(f"{place} returned {type(recipe).__name__}: it must return a Recipe")
    if recipe.fill not in FILL_NAMES:
        raise MethodError(f"{place} has fill={recipe.fill!r}: write one of {', '.join(map(repr, FILL_NAMES))}")
    if recipe.models is not draft.models:
        _check_units(place, "models", recipe.models, draft.new, volume.count)
    drawn = recipe.fill in DRAWN
    _check_list(place, "draws", recipe.draws, draft.new, drawn)
    if recipe.draws and min(recipe.draws) < 0:
        raise MethodError(f"{place} has a draw of {min(recipe.draws)}: draws are counted from 0")
    _check_list(place, "signs", recipe.signs, draft.new, drawn or recipe.fill == "copy")
    _check_list(place, "gradient", recipe.gradient, draft.new, False)
    _check_list(place, "keep", recipe.keep, volume.count, False)
    _check_list(place, "gradient_keep", recipe.gradient_keep, volume.count, False)
    if not isinstance(recipe.fade, int) or recipe.fade < 0:
        raise MethodError(f"{place} has fade={recipe.fade!r}: write a number of steps, a whole number from 0 on")
    _check_demand(place, method, slot, verdict, draft, recipe)
    return recipe


def _title(method: Method) -> str:
    return f"method {method.name!r} ({type(method).__module__}.{type(method).__qualname__})"


def _check_demand(place: str, method: Method, slot: Slot, verdict: Verdict, draft: Draft, recipe: Recipe) -> None:
    """Check that an exact method fills a reader as demanded: with zeros, or with the mean of each row."""
    must = forced(slot, verdict, draft) if slot.role == "reads" and method.exact else None
    if must is not None and recipe.fill != must.fill and not recipe.fade:
        raise MethodError(
            f"{place} has fill={recipe.fill!r}, where only {must.fill!r} keeps the model's outputs: "
            "return forced(slot, verdict, draft) if that is not None"
        )


def _check_list(place: str, name: str, values: Any, length: int, needed: bool) -> None:
    if not isinstance(values, (tuple, list)):
        raise MethodError(f"{place} has {name}={values!r:.60}: it must be a tuple")
    if len(values) != length and (values or needed):
        raise MethodError(f"{place} has {len(values)} {name}: there must be {length}")
    if not all(issubclass(kind, (int, float, np.number)) for kind in set(map(type, values))):
        raise MethodError(f"{place} has {name}={values!r:.60}: they must be numbers")


def _check_units(place: str, name: str, units: Sequence[int], length: int, count: int) -> None:
    _check_list(place, name, units, length, True)
    whole = all(issubclass(kind, (int, np.integer)) for kind in set(map(type, units)))
    if not whole or min(units, default=0) < 0 or max(units, default=0) >= count:
        wrong = next(unit for unit in units if not isinstance(unit, (int, np.integer)) or not 0 <= unit < count)
        raise MethodError(f"{place} has {wrong!r} among its {name}: existing units are numbered from 0 to {count - 1}")
