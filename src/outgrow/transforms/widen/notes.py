"""Lines of a report on what a widening changes besides sizes: rescaled tensors, and outputs that are not preserved."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from outgrow.growth_plan.plan import Plan, Rescaling
from outgrow.model.sandbox import tensors_of
from outgrow.requests import Widen
from outgrow.trace.operators import Trace
from outgrow.transforms.widen.make_plan import Choice
from outgrow.transforms.widen.predict_shapes import Prediction

RESCALED, OUTPUTS = "rescaled", "outputs:"
ROUNDED = "their values are rounded to"
SHOWN = 3  # tensors per factor
HALF = (torch.float16, torch.bfloat16)


def rescaled_note(model: nn.Module, choices: Sequence[Choice], plan: Plan) -> list[str]:
    """Which tensors are rescaled so that no ε has to change, or because of sums over copies; by their factors."""
    paid = {rescale.tensor for choice in choices if choice.verdict.paid for rescale in choice.verdict.rescales}
    notes = [_rescaled(model, plan, paid, "so that the ε of norms stays")] if paid else []
    for verdict in (choice.verdict for choice in choices if choice.verdict.tied):
        before = {rescale.tensor for rescale in verdict.rescales}
        notes.append(_rescaled(model, plan, before, f"since {verdict.tied} both writes and reads all copies"))
    for verdict in (choice.verdict for choice in choices if choice.verdict.compared and choice.verdict.rescales):
        before = {rescale.tensor for rescale in verdict.rescales}
        notes.append(_rescaled(model, plan, before, f"since {verdict.compared} compares or adds up all copies"))
    return notes


def _rescaled(model: nn.Module, plan: Plan, rescaled: Collection[str], reason: str) -> str:
    factors: dict[str, float] = {}
    for edit in plan.edits:
        if isinstance(edit, Rescaling) and edit.tensor in rescaled:
            factors[edit.tensor] = factors.get(edit.tensor, 1.0) * edit.factor
    alike: dict[str, list[str]] = {}
    for name, factor in factors.items():
        alike.setdefault(f"{factor:.4g}", []).append(name)
    shown = (f"× {factor}: {_listed(names)}" for factor, names in sorted(alike.items(), reverse=True))
    tensors = tensors_of(model)
    kinds = {tensors[name].dtype for name in factors} & set(HALF)
    rounded = f"; {ROUNDED} {_words(kinds)}" if kinds else ""
    return f"{RESCALED}, {reason}: {'; '.join(shown)}{rounded}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _words(kinds: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def outputs_note(trace: Trace, requests: Sequence[Widen], prediction: Prediction) -> list[str]:
    """Which outputs are preserved, and which others there are, with their shapes before and after."""
    kept = dict.fromkeys(str(name) for request in requests for name in request.kept)
    if not kept:
        return []
    others = []
    for name, values in trace.others.items():
        shapes = [(trace.values[value].shape, prediction.shape(value)) for value in values]
        changed = next(((old, new) for old, new in shapes if old != new), None)
        others.append(name if changed is None else f"{name} {changed[0]} → {changed[1]}")
    left = f"; not compared: {', '.join(others)}" if others else ""
    return [f"{OUTPUTS} {', '.join(kept)} preserved{left}"]
