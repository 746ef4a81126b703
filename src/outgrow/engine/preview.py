"""Plan a growth without making it: `outgrow.plan`.

Transforms are planned as for a growth, then carried out on trial: modules hold other tensors meanwhile, which share the memory
of the model's own until they change, and a journal undoes everything. So the plan also contains settings that follow from the
grown model, such as those of a library's configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.configuration.rebuild_from_config import shapes_suffice
from outgrow.distributed.fsdp import seen_whole
from outgrow.engine.carry_out import Work
from outgrow.engine.plan_steps import on_trial, steps_of
from outgrow.growth_plan.plan import Plan, joined
from outgrow.model.autocast import own_precision
from outgrow.model.check_arguments import check_finite, check_model, check_seed
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.kept_outputs import keeping
from outgrow.model.meta_copy import has_values
from outgrow.model.sandbox import random_state
from outgrow.model.unwrap import bare
from outgrow.process.garbage_collection import without_garbage_collection
from outgrow.transforms.all_transforms import check_transforms, kept_outputs
from outgrow.transforms.site_and_step import Step
from outgrow.verify import outputs as verify
from outgrow.wrong_arguments import usage


@usage("outgrow.plan(model, example, outgrow.Widen('*', factor=1.5))")
def plan(model: nn.Module, example: Example, *transforms: Any, seed: int = 0) -> Plan:
    """Plan a growth by these transforms, as `outgrow.grow` would make it. The model does not change.

    The plan can be printed. Its `changes` are sizes before and after, its `inserts` new modules and how they start, its `edits`
    new entries of tensors, its `settings` attributes that change; `plan.renamed(name)` is the new name of a module or tensor.
    Impossible requests are refused with the reason, as by the growth itself. Optimizers are not checked.

    Args:
        model: it may be on the meta device, as long as its code reads no values.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        transforms: what to grow, e.g. `outgrow.Widen("layer1.*", factor=1.5)`.
        seed: for the values that the growth would draw.

    Example:
        >>> import outgrow, torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> planned = plan(model, torch.zeros(1, 4), outgrow.Widen("0", to=12), outgrow.Deepen("1", method="net2net"))
        >>> print(planned)
        volume    size    method
        ────────  ──────  ───────
        0         8 → 12  r2r
        behind 1  0 → 1   net2net
        2: a new block
        >>> planned.renamed("2.weight"), model[0].out_features
        ('3.weight', 8)
    """
    check_transforms(transforms)
    check_seed(seed)
    model = bare(model)
    with random_state(), without_garbage_collection(), uncompiled(), seen_whole([model], []), keeping(kept_outputs(transforms)):
        check_model(model, values=False)
        without = not has_values(model)
        if not without:
            check_finite(model)
        with own_precision(model, example), shapes_suffice() if without else nullcontext():
            return _planned(model, example, transforms, seed)


def _planned(model: nn.Module, example: Example, transforms: Any, seed: int) -> Plan:
    anatomy = dissect(model, example, both_modes=verify.draws(model, example))
    with Journal() as journal:
        steps = steps_of(model, example, transforms, seed, anatomy, journal)
        return on_trial(model, journal, lambda tried: _joined(Work(model, [], [], example, tried), steps))


def _joined(work: Work, steps: Sequence[Step]) -> Plan:
    """Carry out steps; returns their plans joined into one."""
    for step in steps:
        work.carry_out(step)
    work.describe(work.example)
    return joined(work.plans)
