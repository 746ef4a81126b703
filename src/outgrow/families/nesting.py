"""Refuse growths after which the smaller network is not a part of the larger one.

A member of a family is the larger network with fewer entries, so a growth may add entries and modules, but must leave existing
values as they are. R2R, NetMorph, new blocks, kernels and branches do. Copies share out the columns of their originals, means
under norms multiply γ, writers that pay for a stream are multiplied too, and a split layer is rotated: those are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from outgrow.apply.weight_fades import drifts_of
from outgrow.errors import MethodError, Problem
from outgrow.growth_plan.plan import Edit, Insertion, Plan, Rescaling, Rotation, renamed
from outgrow.history.growth_order import former
from outgrow.modules.gates import gates_of
from outgrow.text.plurals import counted

OTHER_METHOD = "write method='r2r' or 'netmorph', which leave existing values as they are"
OTHER_VOLUMES = (
    "leave streams under layer or RMS norms as they are, and widen what lies between them: kind='mlp', kind='heads', or names"
)

OTHER_HEADS = "write kind='heads' for more heads of the same size"


def check_nested(plans: Sequence[Plan], parameters: Collection[str]) -> None:
    """Raise MethodError if a growth changes existing values of parameters. parameters: their names after the growth.

    Buffers may change, since each member has its own, and so may new modules.
    """
    found: dict[tuple[str, str], list[str]] = {}  # names by reason and way out
    for number, plan in enumerate(plans):
        for edit in plan.edits:
            reason, instead = _changes(edit)
            before = former(edit.tensor, "", plans[: number + 1]) if reason else None
            if before is not None and renamed(edit.tensor, plans[number + 1 :]) in parameters:
                found.setdefault((reason, instead), []).append(before)
    if found:
        raise MethodError(
            "this growth changes existing values, so the smaller network would not be a part of the larger one",
            [Problem(_together(names), reason, instead) for (reason, instead), names in found.items()],
        )


def _together(names: Sequence[str]) -> str:
    more = len(set(names)) - 1
    return names[0] + (f" and {counted(more, 'other parameter')}" if more else "")


def _changes(edit: Edit) -> tuple[str, str]:
    """How an edit changes existing values, and the way out; empty if it does not."""
    if isinstance(edit, Insertion):
        factors = [factor for factor in edit.keep if factor != 1.0]
        if factors and edit.fill == "copy":
            return "copies of units (Net2Net) take a share of its values", OTHER_METHOD
        return (f"larger heads need existing queries times {factors[0]:.4g}", OTHER_HEADS) if factors else ("", "")
    if isinstance(edit, Rotation):
        return "a layer that is split in two is multiplied by an orthogonal matrix", "write method='r2r' for the new block"
    changes = isinstance(edit, Rescaling) and edit.factor != 1.0
    return (f"a wider stream under norms needs its values times {edit.factor:.4g}", OTHER_VOLUMES) if changes else ("", "")


def check_without_fades(model: nn.Module) -> None:
    """Raise MethodError if new units or blocks of a model are fading in: a member would need a fade of its own."""
    fading = [*gates_of(model), *(name for name, _ in drifts_of(model))]
    if fading:
        raise MethodError(
            "a member of a family can't fade in",
            [Problem(fading[0], "it fades in with the steps of an optimizer", "leave fade= out, or wait until it has ended")],
        )
