"""Why no values of a configuration describe the grown model, in words for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from outgrow.configuration.rebuild_from_config import OtherEpsilon, RebuiltDiffers, Steady, Unbuildable
from outgrow.model.module_paths import joined_path

NOT_UPDATED = "config: it does not describe the grown model"
HEADS = ("heads", "n_head")  # ends of names
STREAMS = {"hidden_size", "n_embd", "d_model", "dim"}
LONG = 40  # characters of a list in a report

Guess = Mapping[tuple[str, str], tuple[Any, Any]]  # module that holds the configuration, name → value before and after


def left(reason: str, exchanged: str = "") -> str:
    """The line of a report for a configuration that does not describe the grown model.

    exchanged: a module of another class than in a newly built model, in words.
    """
    advice = "use outgrow.save and outgrow.load, save_pretrained would not restore the model"
    if exchanged:
        advice += (
            f"; {exchanged}: if the model's code exchanges it for some inputs, run the new model on one before outgrow.load"
        )
    return f"{NOT_UPDATED} ({reason}); {advice}"


def explained(failures: Sequence[tuple[Guess, RebuiltDiffers]], steady: Steady) -> str:
    """The reason of the attempt that came closest; the first of equals, which is the likeliest.

    If the library itself refuses the likeliest values, attempts with only some of them explain nothing.
    """
    guess, reason = max(failures, key=lambda failure: failure[1].agreement)
    likeliest, refusal = failures[0]
    if isinstance(refusal, Unbuildable) and guess.keys() < likeliest.keys():
        guess, reason = likeliest, refusal
    values = {name: new for (_, name), (_, new) in guess.items()}
    if isinstance(reason, OtherEpsilon) and (two := _two_values(values, reason, steady)):
        return two
    written = ", ".join(f"{name} {shown(value)}" for name, value in values.items())
    if isinstance(reason, Unbuildable):
        return f"with {written}, {reason}" if written else str(reason)
    return f"built from it{f' with {written}' if written else ''}, {reason}{_with_the_width(values, reason)}"


def _with_the_width(values: Mapping[str, Any], reason: RebuiltDiffers) -> str:
    """The way out where only the number of heads has grown, and a tensor has another shape; empty elsewhere."""
    if type(reason) is not RebuiltDiffers or not any(name.endswith(HEADS) for name in values) or STREAMS & values.keys():
        return ""
    both = "outgrow.Widen(kind='heads', factor=2), outgrow.Widen(kind='width', factor=2)"
    return f"; if it derives the size of a head from the width, let both grow in one call: {both}"


def _two_values(values: Mapping[str, Any], reason: OtherEpsilon, steady: Steady) -> str:
    """One field of the configuration that would need two values; empty if the difference is another."""
    field = next((name for name, value in values.items() if isinstance(value, float) and _equal(value, reason.found)), "")
    place = next((joined_path(*key) for key, value in steady.items() if _equal(value, reason.found)), "")
    if not field or not place:
        return ""
    return f"{field} would have to be {reason.found:.3g} for {place} and {reason.needed:.3g} for {reason.place}"


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)


def shown(value: Any) -> str:
    """A value in a report: long lists, and names of classes, by their number."""
    if isinstance(value, dict):
        return f"{len(value)} entries"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) and len(text) > LONG else text
