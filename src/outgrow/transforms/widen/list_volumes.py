"""List the volumes of a model, the exact methods for each, and the reasons against the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from outgrow.analysis.analyse import watch
from outgrow.analysis.find_volumes import find_volumes
from outgrow.analysis.interpret_trace import read
from outgrow.analysis.lengthen_stacks import lengthened, multiplicities, stationary
from outgrow.analysis.rules.all_rules import RULES
from outgrow.analysis.shorten_stacks import shortened
from outgrow.analysis.slot_positions import irregular
from outgrow.analysis.unit_states import Verdict
from outgrow.analysis.unused_parameters import pin_doubtful
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.exactness.propagate_states import judge
from outgrow.methods.all_methods import by_name
from outgrow.model.check_arguments import check_module
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example
from outgrow.model.kept_outputs import keeping
from outgrow.model.unwrap import bare
from outgrow.process.garbage_collection import without_garbage_collection
from outgrow.requests import Widen
from outgrow.trace.operators import Trace
from outgrow.transforms.widen.norm_epsilon import missing_eps
from outgrow.transforms.widen.same_sizes import SameSizes
from outgrow.transforms.widen.writers_pay import plain_payment
from outgrow.wrong_arguments import usage


@usage("outgrow.volumes(model, example)")
@uncompiled()
def volumes(model: nn.Module, example: Example, outputs: str | int | Sequence[str | int] | None = None) -> list[Volume]:
    """List all volumes of a model: name, size, slots, the methods by which each can grow, or why it can't.

    The methods are those that are exact. Whether the model's code follows a new size is found by the growth itself, and by
    `outgrow.plan`, which run it; where the code gives two volumes one size, the reason says so. The model may be on the meta
    device: volumes depend on its code and its shapes, not on values.

    outputs: the outputs that a growth would preserve, as in `outgrow.Widen`; all of them by default.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [(volume.name, volume.size, volume.growable) for volume in volumes(model, torch.zeros(1, 4))]
        [('0', 8, True), ('0#2', 4, False), ('2', 2, False)]
    """
    model = bare(model)
    check_module(model, values=False)
    with without_garbage_collection(), keeping(Widen(factor=2, outputs=outputs).kept):
        return _volumes_in(model, watch(model, example))


def explain(model: nn.Module, anatomy: Anatomy, volume: Volume) -> None:
    """Set a volume's exact methods, and the reasons against the others."""
    if volume.pinned:
        volume.reason = volume.pinned
        return
    problem = irregular(anatomy, volume)
    if problem is not None:
        volume.reason = str(problem)
        return
    legal, reasons = [], []
    for name, methods in by_name().items():
        if name == "auto" or not methods[0].exact:
            continue
        verdicts = [judge(anatomy, volume, method.state) for method in methods]
        refusals = [
            verdict.refusal or (verdict.stuck if len(methods) > 1 else "") or _without_eps(model, anatomy, volume, verdict)
            for verdict in verdicts
        ]
        if all(refusals):
            firsts: dict[str, str] = {}  # refusal → the first method with this refusal
            for method, refusal in zip(methods, refusals, strict=True):
                firsts.setdefault(refusal, method.name)
            reasons += [f"{first}: {refusal}" for refusal, first in firsts.items()]
        else:
            legal.append(name)
    volume.methods, volume.reason = tuple(legal), "; ".join(reasons)


def _without_eps(model: nn.Module, anatomy: Anatomy, volume: Volume, verdict: Verdict) -> str:
    """The reason against a state that has to change an ε which no attribute holds, unless writers can pay instead."""
    reason = missing_eps(model, verdict.eps)
    if reason and (refusal := judge(anatomy, volume, verdict.state, plain_payment(model)).refusal):
        return f"{reason}; and if its writers are rescaled instead: {refusal}"
    return ""


def _volumes_in(model: nn.Module, trace: Trace) -> list[Volume]:
    """All volumes of a trace. Equal blocks of a stack are analysed once, and their volumes copied, where that is possible."""
    short = shortened(trace)
    if short is not None:
        anatomy = find_volumes(read(short.trace, RULES), multiplicities(short))
        found = lengthened(short, _explained(model, anatomy)) if stationary(short, anatomy) else None
        if found is not None:
            return found
    anatomy = find_volumes(read(trace, RULES))
    pin_doubtful(anatomy)
    return list(_explained(model, anatomy).volumes)


def _explained(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    sizes = SameSizes(anatomy)
    for volume in anatomy.volumes:
        explain(model, anatomy, volume)
        if volume.methods and (doubt := sizes.reason(volume)):
            volume.reason = "; ".join(filter(None, (volume.reason, doubt)))
    return anatomy
