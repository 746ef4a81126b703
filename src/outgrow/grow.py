"""Grow a model: the whole story on one page.

    trace → volumes → plan → fit → apply → verify

Each arrow is a module. Until `apply` nothing is touched (but for `residual="fold"`, which sets a volume apart before it is
planned); from there a journal can put everything back, and does on any failure.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow import adapters, unrun, verify
from outgrow.admit import bare, check_averages, check_finite, check_model, check_seed
from outgrow.anatomy import dissect, watch
from outgrow.apply import Journal, apply_plan, apply_setting
from outgrow.brief import Brief, part_of
from outgrow.configuration import changed, follow
from outgrow.device_memory import reserve
from outgrow.draft import inits_of
from outgrow.errors import GrowthError, TraceError
from outgrow.flops import count_flops
from outgrow.garbage import collected_later
from outgrow.graft import apply_grafts
from outgrow.interrupts import Deferral
from outgrow.methods.base import Init
from outgrow.plan import Plan, joined, noted, renamed
from outgrow.positions import prepare
from outgrow.precision import own_precision
from outgrow.predict import Prediction
from outgrow.reach import check_reached
from outgrow.report import Growth, remarks
from outgrow.sandbox import random_state, tensors_of
from outgrow.settle import settle
from outgrow.takeover import Turn, check_turns, turns_of
from outgrow.trace import Example
from outgrow.training.compiled import forget_compiled, uncompiled
from outgrow.training.drift import drifts_of, grow_drifts
from outgrow.training.fade import gates_of
from outgrow.training.gated import check_gates
from outgrow.training.history import history, remember
from outgrow.training.optimizer import adopt, grow_optimizers, thaw, unwrapped
from outgrow.training.parallel import together
from outgrow.training.stale import shapes_before, watch_for_stale
from outgrow.transforms.branch import Branch, branch_step
from outgrow.transforms.deepen import Deepen, Templates, deepen_step
from outgrow.transforms.fold import fold_residuals
from outgrow.transforms.kernel import Kernel, kernel_plan
from outgrow.transforms.widen import Skip, Widen
from outgrow.usage import usage
from outgrow.volumes import Anatomy

Transform = Widen | Deepen | Kernel | Branch
THAWED = "what is new there learns, though what it is a copy of is frozen"


@usage("outgrow.grow(model, example, outgrow.Widen('*', factor=1.5))")
def grow(
    model: nn.Module,
    example: Example,
    *transforms: Transform,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Carry out several transforms as one: all of them or none.

    Args:
        model: any module that runs on the example; it is changed in place, and must not run in another thread meanwhile.
            `torch.compile` and DistributedDataParallel are looked through: names are those of the module within, and the
            wrapper goes on (all ranks must make the call).
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        transforms: what to grow, e.g. `outgrow.Widen("layer1.*", factor=1.5)`, `outgrow.Deepen(after="layer2.1")`,
            `outgrow.Kernel("conv1", 9)` or `outgrow.Branch(beside="layer3")`; all names are those of the model as it is.
        optimizer: one or several optimizers whose state follows.
        average: averaged copies of the model (EMA, SWA) that grow by the same plan.
        seed: for the free values; the global random state is neither read nor changed.
        check: run the old and the new model on the example and compare (in eval and train mode).

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> growth = grow(model, torch.zeros(1, 4), Widen("0", to=12))
        >>> model[0].out_features, growth.parameters
        (12, (58, 86))
    """
    if not transforms:
        raise GrowthError("nothing to do: pass at least one transform, e.g. outgrow.Widen('*', factor=1.5)")
    strangers = [transform for transform in transforms if not isinstance(transform, (Widen, Deepen, Kernel, Branch))]
    if strangers:
        raise GrowthError(f"{strangers[0]!r} is no transform: write e.g. outgrow.Widen('*', factor=1.5)")
    check_seed(seed)
    return carry_through(model, example, transforms, several(optimizer), several(average), seed, check)[0]


def rehearse(model: nn.Module, example: Example, transforms: Sequence[Transform], seed: int = 0) -> tuple[Growth, Ready | None]:
    """Grow a copy of a model that nobody trains, which may be one without numbers, as `grow` would grow the model.

    Returns also what is left to do with the model itself, if all that has to be found out is known from the copy.
    """
    shapes = shapes_of(model)
    growth, work = carry_through(model, example, transforms, [], [], seed, check=False, rehearsal=True)
    return growth, Ready.of(shapes, work, growth)


def carry_through(
    given: nn.Module,
    example: Example,
    transforms: Sequence[Transform],
    optimizers: Sequence[torch.optim.Optimizer],
    averages: Sequence[nn.Module],
    seed: int,
    check: bool,
    rehearsal: bool = False,
    ready: Ready | None = None,
    brief: Brief | None = None,
    interrupts: Deferral | None = None,
) -> tuple[Growth, Work]:
    """A growth from its first look at the model to its report.

    ready: what a rehearsal of it has found out; brief: how outputs are to be checked if that is all that is left to do.
    interrupts: begins once the growth is sure to stay, for a caller who must note that too before it can be interrupted.
    """
    if interrupts is None:
        with Deferral() as own:
            return carry_through(
                given, example, transforms, optimizers, averages, seed, check, rehearsal, ready, brief, interrupts=own
            )
    started = time.perf_counter()
    model, copies = bare(given), [bare(getattr(average, "module", average)) for average in averages]
    lengths = None if brief is None else brief.lengths
    with (
        random_state(),
        collected_later(),
        uncompiled(),
        together(given, model, copies, optimizers, example, lengths) as ranks,
        contextlib.ExitStack() as stack,
    ):
        example = ranks.example
        check_model(model, numbers=not rehearsal)
        if not rehearsal:
            check_finite(model)
        check_averages(averages, model)
        stack.enter_context(own_precision(model, example))
        known = ready is not None and ready.fits(model)
        short = ranks.lengths if known and brief is not None and brief.still(model, example) else None
        sample, base = _look(model, example, short) if check else (example, None)
        before = _parameters(model)
        work = Work(model, copies, optimizers, example, seed)
        turns, pairs = list[Turn](), unrun.NOBODY  # of modules that the example does not run
        stack.enter_context(work.journal)  # a second time, should an interrupt come while it is undone below
        try:
            if ready is not None and known:
                flops = work.follow(ready, sample)
            else:
                draws = base.draws if base is not None else rehearsal and verify.draws(model, example)
                anatomy = dissect(model, example, both_modes=draws)
                pairs = anatomy.reading.trace.understudies
                turns = turns_of(model, example, pairs) if check else []
                flops = work.find_and_do(transforms, anatomy)
            preserving = all(change.exact for plan in work.plans for change in plan.changes)
            worst, allowed = float("nan"), 0.0
            if base is not None:
                worst, allowed = verify.check(model, sample, base, preserving)
                check_turns(model, example, turns, pairs, work.plans, preserving)
                check_gates(given, model, sample)
                if brief is not None and work.added:
                    brief.look(model, example)  # what is widened runs the same operators
            ranks.conclude(work.plans)
            interrupts.begin()
        except BaseException:
            work.journal.undo()
            raise
    for number, plan in enumerate(work.plans):
        remember(model, replace(plan, continues=number > 0))
    if not rehearsal:
        forget_compiled()
        call = type(transforms[0]).__name__.lower() if len(transforms) == 1 else "grow"
        watch_for_stale(work.changed, work.added, call, [*optimizers, *unwrapped(optimizers)])
    dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    growth = Growth(
        model,
        joined(work.plans),
        worst,
        allowed,
        tuple(work.skipped),
        (before, _parameters(model)),
        flops,
        time.perf_counter() - started,
        preserving,
        dropout or (base is not None and (base.drops or (brief is not None and brief.drops))),
        (*work.notes, *remarks(model, "" if base is None else base.untrained)),
    )
    return growth, work


def _look(model: nn.Module, example: Example, lengths: Sequence[int] | None) -> tuple[Example, verify.Outputs]:
    """What is to be kept: on the whole example, or in one pass on a part of it; and on what it was seen."""
    if lengths is not None:
        try:
            part = part_of(example, lengths)
            base = verify.before(model, part, brief=True)
            if all(bool(torch.isfinite(output).all()) for output in base.evaluated):
                return part, base
        except TraceError:  # the part was found on a smaller model: on this one the whole must do
            pass
    return example, verify.before(model, example)


@dataclass(frozen=True, eq=False)
class Ready:
    """What a rehearsal has found out, so that a growth need only be carried out: plans, and how drawn values are drawn."""

    shapes: Mapping[str, tuple[int, ...]]  # of the model's tensors before
    plans: Sequence[Plan]
    inits: Sequence[Mapping[str, Init]]
    deepenings: Sequence[tuple[Deepen, Templates]]
    skipped: Sequence[Skip]
    notes: Sequence[str]
    flops: tuple[int, int]

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], work: Work, growth: Growth) -> Ready | None:
        """None if modules are put in that are no blocks of the model's own kind: these are made from its numbers."""
        plans = [plan for plan in work.plans if not plan.inserts]
        if work.built or any(plan.grafts for plan in plans):
            return None
        for plan in plans:
            prepare(plan)
        return Ready(shapes, plans, work.inits[: len(plans)], work.deepened, work.skipped, work.notes, growth.flops)

    def fits(self, model: nn.Module) -> bool:
        """Whether the model is as the copy was. What is fading in changes how it is read."""
        return shapes_of(model) == self.shapes and not gates_of(model) and not any(True for _ in drifts_of(model))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(model).items()}


class Work:
    """A growth under way: what was done so far to the model and to all that follows it, and how to undo it."""

    def __init__(
        self, model: nn.Module, copies: Sequence[nn.Module], optimizers: Sequence[Any], example: Example, seed: int
    ) -> None:
        self.model, self.copies, self.optimizers, self.example, self.seed = model, copies, optimizers, example, seed
        self.journal = Journal()
        self.plans: list[Plan] = []
        self.inits: list[Mapping[str, Init]] = []  # of each plan
        self.deepened: list[tuple[Deepen, Templates]] = []  # by blocks of the model's own kind
        self.built = False  # other modules were put in
        self.skipped: list[Skip] = []
        self.notes: list[str] = []
        self.changed: list[tuple[Tensor, str, tuple[int, ...]]] = []
        self.added: list[tuple[nn.Parameter, nn.Parameter, str]] = []
        self._after: int | None = None

    def find_and_do(self, transforms: Sequence[Transform], anatomy: Anatomy) -> tuple[int, int]:
        """All transforms, one after the other; the FLOPs before and after."""
        self.notes += unrun.note(self.model, anatomy.reading.trace.unused, anatomy.reading.trace.understudies)
        for kernel in (transform for transform in transforms if isinstance(transform, Kernel)):
            self.carry_out(kernel_plan(self.model, self.anatomy(anatomy), kernel, self.seed))
        widenings = [transform for transform in transforms if isinstance(transform, Widen)]
        if widenings:
            self.widen(self.anatomy(anatomy), widenings)
        for deepening in (transform for transform in transforms if isinstance(transform, Deepen)):
            self.deepen(replace(deepening, after=renamed(deepening.after, self.plans)))
        for branch in (transform for transform in transforms if isinstance(transform, Branch)):
            self.branch(replace(branch, beside=renamed(branch.beside, self.plans)))
        trace = anatomy.reading.trace
        shape = [value.shape for value in trace.values]
        flops = count_flops(trace, shape.__getitem__), self.flops(anatomy)
        self.describe(self.example)
        return flops

    def follow(self, ready: Ready, sample: Example) -> tuple[int, int]:
        """Do what a rehearsal has found out; the FLOPs before and after. `sample`: on which outputs are compared."""
        for plan, inits in zip(ready.plans, ready.inits, strict=True):
            self.carry_out(plan, inits)
        for deepening, templates in ready.deepenings:
            self.deepen(deepening, templates)
        if ready.deepenings:
            self.notes = [note for note in ready.notes if note.startswith(unrun.NOTE)]
            self.describe(sample)
        else:
            self.notes = list(ready.notes)
        self.skipped = list(ready.skipped)
        return ready.flops

    def anatomy(self, first: Anatomy) -> Anatomy:
        """The model as it is now; `first` is how it was before."""
        return dissect(self.model, self.example, both_modes=len(first.reading.trace.passes) > 1) if self.plans else first

    def flops(self, first: Anatomy) -> int:
        if self._after is None:
            trace = watch(self.model, self.example) if self.plans else first.reading.trace
            check_reached(trace, joined(self.plans).new_blocks if self.plans else ())
            self._after = count_flops(trace, [value.shape for value in trace.values].__getitem__)
        return self._after

    def carry_out(self, plan: Plan, inits: Mapping[str, Init] | None = None) -> None:
        """Grow the tensors of the model, its optimizers and its averaged copies; grafts are in the model already."""
        inits = inits or {}
        tensors = tensors_of(self.model)
        reserve(tensors, plan, self.optimizers)
        before = {id(tensor): tensor.detach() for tensor in tensors.values()}
        for one in (self.model, *self.copies):
            own = tensors if one is self.model else tensors_of(one)
            olds = {name: tensor.detach() for name, tensor in own.items()}
            if one is not self.model:
                apply_grafts(one, plan, self.journal)
            apply_plan(one, plan, inits, self.journal, like=tensors, tensors=own)
            grow_drifts(one, plan, olds, inits, self.journal, start=one is self.model)
        grow_optimizers(self.optimizers, tensors, plan, before, self.journal)
        self.changed += shapes_before(tensors, plan)
        self.plans.append(plan)
        self.inits.append(inits)

    def widen(self, anatomy: Anatomy, requests: Sequence[Widen]) -> None:
        anatomy, requests, grafts = fold_residuals(self.model, self.example, anatomy, requests, self.journal)
        choices, skipped, plan = settle(self.model, self.example, anatomy, requests, self.seed)
        self._after = count_flops(anatomy.reading.trace, Prediction(anatomy, choices).shape)
        self.carry_out(replace(plan, grafts=grafts), inits_of(choices))
        self.skipped += skipped

    def deepen(self, request: Deepen, known: Templates | None = None) -> None:
        models = [self.model, *self.copies]
        plans, sources, templates = deepen_step(models, self.example, request, self.seed, self.journal, known)
        if templates is None:
            self.built = True
        else:
            self.deepened.append((request, templates))
        if thaw(self.model, sources):
            plans[-1] = noted(plans[-1], THAWED)
        self.added += adopt(self.optimizers, self.model, sources, self.journal)
        for plan in plans:
            self.carry_out(replace(plan, settings=()))
            self.plans[-1] = plan  # its settings are made already
        self._after = None

    def branch(self, request: Branch) -> None:
        plan, sources = branch_step([self.model, *self.copies], self.example, request, self.seed, self.journal)
        self.built = True
        plan = noted(plan, THAWED) if thaw(self.model, sources) else plan
        self.added += adopt(self.optimizers, self.model, sources, self.journal)
        self.plans.append(plan)
        self.inits.append({})
        self._after = None

    def describe(self, sample: Example) -> None:
        """Let the model's configuration, if it has one, follow: part of the last plan, and told in the report."""
        settings, told = follow(self.model, sample, [*history(self.model), *self.plans], self.journal)
        for one in self.copies:
            for setting in settings:
                apply_setting(one, setting, self.journal)
        self.plans[-1] = replace(self.plans[-1], settings=(*self.plans[-1].settings, *settings))
        new = changed([setting for plan in self.plans for setting in plan.settings])
        self.notes += [f"config: {new}"] if new else []
        self.notes += [told] if told else []
        self.notes += [adapters.NOTE] if adapters.has_adapters(self.model) else []


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
