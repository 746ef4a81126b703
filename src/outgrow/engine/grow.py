"""Grow a model: the whole flow in one file.

    trace → volumes → plan → apply → verify

All transforms are planned first (`engine/plan_steps.py`); trials on the model are undone. Only then is anything changed
(`engine/carry_out.py`), and a journal restores everything on any failure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from outgrow.analysis.analyse import dissect, watch
from outgrow.analysis.volumes import Anatomy
from outgrow.distributed.ddp import together
from outgrow.engine.carry_out import Work
from outgrow.engine.dry_run_findings import Ready, shapes_of
from outgrow.engine.growth_report import UNIT, Growth, remarks, unit_notes
from outgrow.engine.plan_steps import steps_of
from outgrow.engine.responsible_volumes import named
from outgrow.errors import OptimizerError, TraceError, VerifyError
from outgrow.growth_plan.plan import joined, recorded
from outgrow.history.growths_on_model import remember
from outgrow.model import idle_modules as unrun
from outgrow.model.autocast import own_precision
from outgrow.model.check_arguments import check_averages, check_finite, check_model, check_seed, check_switch
from outgrow.model.compiled import forget_compiled, uncompiled
from outgrow.model.example import Example
from outgrow.model.journal import Journal
from outgrow.model.kept_outputs import keeping
from outgrow.model.sandbox import random_state
from outgrow.model.unwrap import as_list, bare
from outgrow.optimizers.stale import watch_for_stale
from outgrow.optimizers.stale_averages import watch_averages
from outgrow.optimizers.wrappers import unwrapped
from outgrow.process.garbage_collection import without_garbage_collection
from outgrow.process.signals import DeferredSignals
from outgrow.requests import Widen
from outgrow.trace import shape_branches, value_reads
from outgrow.trace.contributing_parameters import check_reached
from outgrow.trace.flops import count_flops
from outgrow.transforms.all_transforms import TABLE, Transform, check_transforms, kept_outputs, kind_of
from outgrow.transforms.site_and_step import Step
from outgrow.transforms.widen import expert_sizes
from outgrow.transforms.widen.notes import OUTPUTS, RESCALED
from outgrow.verify import outputs as verify
from outgrow.verify.brief_check import BriefCheck, part_of
from outgrow.verify.compare_old_entries import NewOutputEntries
from outgrow.verify.compiled_gates import check_gates
from outgrow.verify.with_idle_modules import PeerOutputs, check_with_peers, outputs_with_peers
from outgrow.wrong_arguments import usage


@usage("outgrow.grow(model, example, outgrow.Widen('*', factor=1.5))")
def grow(
    model: nn.Module,
    example: Example,
    *transforms: Transform,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
    state: str = "carry",
) -> Growth:
    """Carry out several transforms as one growth: all of them or none.

    Args:
        model: any module that runs on the example; it is changed in place, and must not run in another thread meanwhile.
            `torch.compile` and DistributedDataParallel are unwrapped: names are those of the module inside, and the wrapper
            stays usable (all ranks must make the call).
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        transforms: what to grow, e.g. `outgrow.Widen("layer1.*", factor=1.5)`, `outgrow.Deepen(after="layer2.1")`,
            `outgrow.Kernel("conv1", 9)` or `outgrow.Branch(beside="layer3")`; all names are those before the growth.
        optimizer: one or several optimizers, whose state grows too.
        average: averaged copies of the model (EMA, SWA) that grow by the same plan.
        seed: for drawn values; the global random state is neither read nor changed.
        check: run the old and the new model on the example and compare (in eval and train mode).
        state: of the optimizer: "carry", or "copy" to give new blocks that are copies the state of their originals as well.

    Example:
        >>> import outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> growth = grow(model, torch.zeros(1, 4), outgrow.Widen("0", to=12))
        >>> model[0].out_features, growth.parameters
        (12, (58, 86))
    """
    check_transforms(transforms)
    check_seed(seed)
    check_switch("check", check)
    if state not in ("carry", "copy"):
        raise OptimizerError(f"state={state!r}: write 'carry', or 'copy' to copy the state of blocks with them")
    parts = model, example, transforms, as_list(optimizer), as_list(average), seed, check
    return run_growth(Request(*parts, copy_state=state == "copy"))


@dataclass(frozen=True, eq=False)
class Request:
    """A requested growth: the model, the transforms, and the kind of check.

    ready: the results of a dry run, if there was one. brief: how outputs are then checked in one short pass.
    copy_state: copies of blocks start with the optimizer state of their originals.
    outer: a journal that can undo the growth (but not its record in the history) after it has succeeded.
    """

    given: nn.Module  # the model, or a wrapper around it
    example: Example
    transforms: Sequence[Transform]
    optimizers: Sequence[Any] = ()
    averages: Sequence[nn.Module] = ()
    seed: int = 0
    check: bool = True
    ready: Ready | None = None
    brief: BriefCheck | None = None
    copy_state: bool = False
    outer: Journal | None = None

    @property
    def model(self) -> nn.Module:
        model: nn.Module = bare(self.given)
        return model

    @property
    def copies(self) -> list[nn.Module]:
        return [bare(getattr(average, "module", average)) for average in self.averages]

    @property
    def call(self) -> str:
        """The name of the public call for this growth: "grow" for several transforms, and for registered ones."""
        kind = kind_of(self.transforms[0]) if len(self.transforms) == 1 else None
        return kind.name if kind in TABLE else "grow"


def run_growth(request: Request, interrupts: DeferredSignals | None = None) -> Growth:
    """Make a growth, from reading the model to the report.

    interrupts: begins once the growth is certain to stay, for a caller that must record it before an interrupt.
    """
    if interrupts is None:
        with DeferredSignals() as own:
            return run_growth(request, own)
    try:
        growth, work, _ = _grown(request, interrupts, dry=False)
    except VerifyError as error:
        raise _blamed(error, request) from None
    forget_compiled()
    passed = [*request.optimizers, *unwrapped(request.optimizers)]
    watch_for_stale(work.changed, work.added, request.call, passed)
    watch_averages([tensor for tensor, _, _ in work.changed], [parameter for parameter, _, _ in work.added], request.call)
    return growth


def _blamed(error: VerifyError, request: Request) -> VerifyError:
    """An error about changed outputs, with the names of the responsible volumes if it was one widening in one process."""
    first, *more = request.transforms
    alone = request.given is request.model and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    if more or not alone or not isinstance(first, Widen) or first.residual != "stream" or not error.volumes:
        return error

    def again(model: nn.Module, widen: Widen) -> None:
        with DeferredSignals() as interrupts:
            _grown(Request(model, request.example, (widen,), seed=request.seed), interrupts, dry=False)

    return named(error, request.model, first, error.volumes, again)


def dry_run(model: nn.Module, example: Example, transforms: Sequence[Transform], seed: int = 0) -> tuple[Growth, Ready]:
    """Grow a throw-away copy of a model, possibly on the meta device, as `grow` would grow the model.

    Returns the report, and the steps that are left to carry out on the model itself.
    """
    shapes = shapes_of(model)
    with DeferredSignals() as interrupts:
        request = Request(model, example, transforms, seed=seed, check=False)
        growth, work, planned = _grown(request, interrupts, dry=True)
    return growth, Ready.of(shapes, planned.steps, work, growth.flops)


def _grown(request: Request, interrupts: DeferredSignals, dry: bool) -> tuple[Growth, Work, Planned]:
    """Read the model, plan, carry out and compare; returns the report, the changes made, and the plans."""
    started = time.perf_counter()
    model, copies = request.model, request.copies
    lengths = None if request.brief is None else request.brief.lengths
    with (
        random_state(),
        without_garbage_collection(),
        uncompiled(),
        keeping(kept_outputs(request.transforms)),
        together(request.given, model, copies, request.optimizers, request.example, lengths) as ranks,
        contextlib.ExitStack() as stack,
    ):
        example = ranks.example
        check_model(model, values=not dry)
        if not dry:
            check_finite(model)
        check_averages(request.averages, model)
        stack.enter_context(own_precision(model, example))
        look = _looked(request, example, ranks.lengths)
        before = _parameters(model)
        journal, copied = Journal(request.outer), request.copy_state
        work = Work(model, copies, request.optimizers, example, journal, copy_state=copied, learn=not dry)
        stack.enter_context(work.journal)  # undoes again if an interrupt stops the undoing below
        try:
            planned = _planned(request, look, example, work, dry)
            look = look.comparing(planned.gains)
            flops = _carried_out(planned, look, work)
            worst, allowed = _compared(request, look, planned, work)
            ranks.conclude(work.plans)
            interrupts.begin()
        except BaseException as error:
            work.journal.undo()
            if isinstance(error, VerifyError) and work.plans:
                error.volumes = tuple(change.volume for plan in work.plans for change in plan.changes)
            raise
    for number, plan in enumerate(work.plans):
        remember(model, replace(recorded(plan), continues=number > 0))
    growth = Growth(
        model,
        joined(work.plans),
        worst,
        allowed,
        tuple(skip for step in planned.steps for skip in step.skipped),
        (before, _parameters(model)),
        flops,
        time.perf_counter() - started,
        _preserves(work),
        _drops(request, look),
        (*work.notes, *remarks(model, "" if look.base is None else look.base.untrained)),
        planned.gains,
    )
    return growth, work, planned


@dataclass(frozen=True, eq=False)
class Look:
    """The model before the growth: its outputs, the sample that gave them, and a dry run that fits it.

    base: None if nothing is checked.
    """

    sample: Example
    base: verify.Outputs | None
    ready: Ready | None

    def comparing(self, gains: tuple[NewOutputEntries, ...]) -> Look:
        """The same, of which entries that outputs gain are not compared."""
        return self if self.base is None or not gains else replace(self, base=replace(self.base, gains=gains))


def _looked(request: Request, example: Example, lengths: Sequence[int] | None) -> Look:
    """Run the model on the whole example or, if a dry run has all results, in one pass on a part of the example."""
    model, brief = request.model, request.brief
    ready = request.ready if request.ready is not None and request.ready.fits(model) else None
    if not request.check:
        return Look(example, None, ready)
    known = ready is not None and not ready.takes_statistics
    if known and lengths is not None and brief is not None and brief.is_current(model, example):
        try:
            part = part_of(example, lengths)
            base = verify.before(model, part, brief=True)
            if all(bool(torch.isfinite(output).all()) for output in base.evaluated):
                return Look(part, base, ready)
        except TraceError:  # the part was chosen for a smaller model: use the whole example
            pass
    return Look(example, verify.before(model, example), ready)


@dataclass(frozen=True, eq=False)
class Planned:
    """The planned steps. anatomy: of the model before, unless known from a dry run; with_peers: see `with_idle_modules`."""

    steps: Sequence[Step]
    notes: Sequence[str]
    anatomy: Anatomy | None = None
    with_peers: Sequence[PeerOutputs] = ()
    idle_peers: unrun.IdlePeers = field(default_factory=lambda: unrun.NO_PEERS)

    @property
    def gains(self) -> tuple[NewOutputEntries, ...]:
        """Entries that outputs of the model gain."""
        return tuple(gain for step in self.steps for gain in step.new_entries)


def _planned(request: Request, look: Look, example: Example, work: Work, dry: bool) -> Planned:
    """All steps of the growth; the model itself does not change."""
    model = request.model
    if look.ready is not None:
        kept: tuple[str, ...] = () if look.ready.adds_modules else ("",)  # beginnings of notes
        kept += unrun.NOTE, value_reads.NOTE, UNIT, RESCALED, OUTPUTS, expert_sizes.NOTE
        notes = [note for note in look.ready.notes if note.startswith(kept)]
        return Planned(look.ready.steps, notes)
    draws = look.base.draws if look.base is not None else dry and verify.draws(model, example)
    anatomy = dissect(model, example, both_modes=draws)
    trace = anatomy.reading.trace
    with_peers = outputs_with_peers(model, example, trace.idle_peers) if request.check else ()
    steps = steps_of(model, example, request.transforms, request.seed, anatomy, work.journal)
    notes = [*unrun.note(model, trace.unused, trace.idle_peers), *value_reads.note(trace), *shape_branches.note(model, trace)]
    notes += unit_notes(anatomy.volumes, (plan for step in steps for plan in step.plans))
    notes += [note for step in steps for note in step.notes]
    return Planned(steps, notes, anatomy, with_peers, trace.idle_peers)


def _carried_out(planned: Planned, look: Look, work: Work) -> tuple[int, int]:
    """Carry the plans out; returns the FLOPs before and after."""
    for step in planned.steps:
        work.carry_out(step)
    work.notes += planned.notes
    if look.ready is not None:
        if look.ready.adds_modules:
            work.describe(look.sample, look.base)
        return look.ready.flops
    assert planned.anatomy is not None
    trace = planned.anatomy.reading.trace
    flops = count_flops(trace, [value.shape for value in trace.values].__getitem__), _flops_now(planned, work)
    work.describe(look.sample, look.base)
    return flops


def _flops_now(planned: Planned, work: Work) -> int:
    """FLOPs of the grown model. The same pass checks that the outputs depend on all new modules."""
    known = planned.steps[-1].flops
    if known is not None:
        return known
    trace = watch(work.model, work.example)
    check_reached(trace, joined(work.plans).new_blocks)
    return count_flops(trace, [value.shape for value in trace.values].__getitem__)


def _compared(request: Request, look: Look, planned: Planned, work: Work) -> tuple[float, float]:
    """The change of the outputs, and the allowed change; raises if it is larger."""
    if look.base is None:
        return float("nan"), 0.0
    preserving = _preserves(work)
    worst, allowed = verify.check(work.model, look.sample, look.base, preserving, work.shared)
    with_peers = [replace(one, base=replace(one.base, gains=planned.gains)) for one in planned.with_peers]
    check_with_peers(work.model, work.example, with_peers, planned.idle_peers, work.plans, preserving)
    check_gates(request.given, work.model, look.sample)
    if request.brief is not None and (work.added or any(plan.grafts for plan in work.plans)):
        request.brief.refresh(work.model, work.example)  # widening alone does not change the operators
    return worst, allowed


def _preserves(work: Work) -> bool:
    return all(change.exact for plan in work.plans for change in plan.changes)


def _drops(request: Request, look: Look) -> bool:
    """Whether values are dropped at random in train mode."""
    if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in request.model.modules()):
        return True
    return look.base is not None and (look.base.drops or (request.brief is not None and request.brief.drops))


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
