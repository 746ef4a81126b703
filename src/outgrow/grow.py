"""Grow a model: the whole story on one page.

    trace → volumes → plan → fit → apply → verify

Each arrow is a module. Until `apply` nothing is touched (but for `residual="fold"`, which sets a volume apart before it is
planned); from there a journal can put everything back, and does on any failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow import verify
from outgrow.admit import bare, check_averages, check_model, check_seed
from outgrow.anatomy import dissect
from outgrow.apply import Journal, apply_plan, apply_setting
from outgrow.configuration import changed, follow
from outgrow.draft import inits_of
from outgrow.errors import GrowthError
from outgrow.flops import count_flops
from outgrow.graft import apply_grafts
from outgrow.methods import Method
from outgrow.methods.base import Init
from outgrow.plan import Plan, joined, noted, renamed
from outgrow.predict import Prediction
from outgrow.report import Growth
from outgrow.sandbox import random_state, tensors_of
from outgrow.settle import settle
from outgrow.trace import Example
from outgrow.training.compiled import forget_compiled, uncompiled
from outgrow.training.drift import grow_drifts
from outgrow.training.history import history, remember
from outgrow.training.optimizer import adopt, grow_optimizers, thaw
from outgrow.training.parallel import together
from outgrow.training.stale import shapes_before, watch_for_stale
from outgrow.transforms.branch import Branch, branch_step
from outgrow.transforms.deepen import Deepen, deepen_step
from outgrow.transforms.fold import fold_residuals
from outgrow.transforms.kernel import Kernel, kernel_plan
from outgrow.transforms.widen import Skip, Widen
from outgrow.volumes import Anatomy

THAWED = "what is new there learns, though what it is a copy of is frozen"


def grow(
    model: nn.Module,
    example: Example,
    *transforms: Widen | Deepen | Kernel | Branch,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Carry out several transforms as one: all of them or none.

    Args:
        model: any module that runs on the example; it is changed in place. `torch.compile` and DistributedDataParallel are
            looked through: names are those of the module within, and the wrapper goes on (all ranks must make the call).
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
    return _grow(model, example, transforms, _several(optimizer), _several(average), seed, check)


def rehearse(model: nn.Module, example: Example, transforms: Sequence[Widen | Deepen | Kernel | Branch]) -> Growth:
    """Grow a copy of a model that nobody trains, which may be one without numbers, as `grow` would grow the model."""
    return _grow(model, example, transforms, [], [], 0, check=False, rehearsal=True)


def _grow(
    given: nn.Module,
    example: Example,
    transforms: Sequence[Widen | Deepen | Kernel | Branch],
    optimizers: Sequence[torch.optim.Optimizer],
    averages: Sequence[nn.Module],
    seed: int,
    check: bool,
    rehearsal: bool = False,
) -> Growth:
    started = time.perf_counter()
    model, copies = bare(given), [bare(getattr(average, "module", average)) for average in averages]
    with random_state(), uncompiled(), together(given, model, copies, optimizers, example) as ranks:
        example = ranks.example
        check_model(model, numbers=not rehearsal)
        check_averages(averages, model)
        base, limits = verify.before(model, example) if check else (None, (0.0, 0.0))
        draws = base.draws if base is not None else rehearsal and verify.draws(model, example)
        anatomy = dissect(model, example, both_modes=draws)
        before = _parameters(model)
        work = Work(model, copies, optimizers, example, seed)
        try:
            for kernel in (transform for transform in transforms if isinstance(transform, Kernel)):
                work.carry_out(kernel_plan(model, work.anatomy(anatomy), kernel, seed))
            widenings = [transform for transform in transforms if isinstance(transform, Widen)]
            if widenings:
                work.widen(work.anatomy(anatomy), widenings)
            for deepening in (transform for transform in transforms if isinstance(transform, Deepen)):
                work.deepen(replace(deepening, after=renamed(deepening.after, work.plans)))
            for branch in (transform for transform in transforms if isinstance(transform, Branch)):
                work.branch(replace(branch, beside=renamed(branch.beside, work.plans)))
            shape = [value.shape for value in anatomy.reading.trace.values]
            flops = count_flops(anatomy.reading.trace, shape.__getitem__), work.flops(anatomy)
            work.describe()
            preserving = all(change.exact for plan in work.plans for change in plan.changes)
            worst, allowed = float("nan"), 0.0
            if base is not None:
                worst, allowed = verify.check(model, example, base, limits, preserving)
            ranks.conclude(work.plans)
        except BaseException:
            work.journal.undo()
            raise
        work.journal.close()
    for number, plan in enumerate(work.plans):
        remember(model, replace(plan, continues=number > 0))
    if not rehearsal:
        forget_compiled()
        call = type(transforms[0]).__name__.lower() if len(transforms) == 1 else "grow"
        watch_for_stale(work.changed, work.added, call)
    dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    return Growth(
        model,
        joined(work.plans),
        worst,
        allowed,
        tuple(work.skipped),
        (before, _parameters(model)),
        flops,
        time.perf_counter() - started,
        preserving,
        dropout or (base is not None and base.drops),
        tuple(work.notes),
    )


class Work:
    """A growth under way: what was done so far to the model and to all that follows it, and how to undo it."""

    def __init__(
        self, model: nn.Module, copies: Sequence[nn.Module], optimizers: Sequence[Any], example: Example, seed: int
    ) -> None:
        self.model, self.copies, self.optimizers, self.example, self.seed = model, copies, optimizers, example, seed
        self.journal = Journal()
        self.plans: list[Plan] = []
        self.skipped: list[Skip] = []
        self.notes: list[str] = []
        self.changed: list[tuple[Tensor, str, tuple[int, ...]]] = []
        self.added: list[tuple[nn.Parameter, nn.Parameter, str]] = []
        self._after: int | None = None

    def anatomy(self, first: Anatomy) -> Anatomy:
        """The model as it is now; `first` is how it was before."""
        return dissect(self.model, self.example, both_modes=len(first.reading.trace.passes) > 1) if self.plans else first

    def flops(self, first: Anatomy) -> int:
        if self._after is None:
            trace = self.anatomy(first).reading.trace
            self._after = count_flops(trace, [value.shape for value in trace.values].__getitem__)
        return self._after

    def carry_out(self, plan: Plan, inits: Mapping[str, Init] | None = None) -> None:
        """Grow the tensors of the model, its optimizers and its averaged copies; grafts are in the model already."""
        inits = inits or {}
        before = {id(tensor): tensor.detach() for tensor in tensors_of(self.model).values()}
        for one in (self.model, *self.copies):
            olds = {name: tensor.detach() for name, tensor in tensors_of(one).items()}
            if one is not self.model:
                apply_grafts(one, plan, self.journal)
            apply_plan(one, plan, inits, self.journal)
            grow_drifts(one, plan, olds, inits, self.journal, start=one is self.model)
        grow_optimizers(self.optimizers, self.model, plan, before, self.journal)
        self.changed += shapes_before(self.model, plan)
        self.plans.append(plan)

    def widen(self, anatomy: Anatomy, requests: Sequence[Widen]) -> None:
        anatomy, requests, grafts = fold_residuals(self.model, self.example, anatomy, requests, self.journal)
        choices, skipped, plan = settle(self.model, self.example, anatomy, requests, self.seed)
        self._after = count_flops(anatomy.reading.trace, Prediction(anatomy, choices).shape)
        self.carry_out(replace(plan, grafts=grafts), inits_of(choices))
        self.skipped += skipped

    def deepen(self, request: Deepen) -> None:
        plans, sources = deepen_step([self.model, *self.copies], self.example, request, self.seed, self.journal)
        if thaw(self.model, sources):
            plans[-1] = noted(plans[-1], THAWED)
        self.added += adopt(self.optimizers, self.model, sources, self.journal)
        for plan in plans:
            self.carry_out(replace(plan, settings=()))
            self.plans[-1] = plan  # its settings are made already
        self._after = None

    def branch(self, request: Branch) -> None:
        plan, sources = branch_step([self.model, *self.copies], self.example, request, self.seed, self.journal)
        plan = noted(plan, THAWED) if thaw(self.model, sources) else plan
        self.added += adopt(self.optimizers, self.model, sources, self.journal)
        self.plans.append(plan)
        self._after = None

    def describe(self) -> None:
        """Let the model's configuration, if it has one, follow: part of the last plan, and told in the report."""
        settings, told = follow(self.model, self.example, [*history(self.model), *self.plans], self.journal)
        for one in self.copies:
            for setting in settings:
                apply_setting(one, setting, self.journal)
        self.plans[-1] = replace(self.plans[-1], settings=(*self.plans[-1].settings, *settings))
        new = changed([setting for plan in self.plans for setting in plan.settings])
        self.notes += [f"config: {new}"] if new else []
        self.notes += [told] if told else []


def widen(
    model: nn.Module,
    example: Example,
    where: str | Sequence[str] = "*",
    *,
    factor: float | None = None,
    by: int | None = None,
    to: int | None = None,
    method: str | Method = "auto",
    residual: str = "stream",
    fade: int | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Add units to the volumes that `where` selects, without changing what the model computes.

    Args:
        where: names or globs; a pattern selects a volume if it matches its name, or the path of every module that writes it.
        factor, by, to: exactly one; a factor is rounded to the nearest size that the volume and the method allow.
        method: "auto", "r2r", "net2net", "netmorph", "mean", "random", or an instance such as `outgrow.R2R(init="he")`.
        residual: "stream" widens whole residual streams; "fold" is the paper's folded residual: `where` names a module
            that writes a stream, and only the volume it writes is widened, by R2R; its skips go through an `outgrow.Fold`.
        fade: over how many optimizer steps new units come in: they are drawn, and what reads them goes from zero to drawn
            values. Where that would not be exact, `method="auto"` takes a method that needs no fade.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(widen(model, torch.zeros(1, 4), "0", factor=1.5, method="r2r").plan)
        volume  size    method
        ──────  ──────  ──────
        0       8 → 12  r2r
    """
    request = Widen(where, factor, by, to, method, residual, fade)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


def deepen(
    model: nn.Module,
    example: Example,
    after: str,
    *,
    count: int = 1,
    method: str = "auto",
    fade: int | None = None,
    layers: int | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Put new blocks behind the module `after`, without changing what the model computes.

    Args:
        after: the path of a block; `outgrow.places(model, example)` lists those behind which there can be another.
        count: how many.
        method: "auto" or "r2r" (a copy of a block whose branches are made zero; behind plain layers an
            `outgrow.ResidualBlock`), "r2r-paper" (the same, also where branches end in a batch norm), "residual" (an
            `outgrow.ResidualBlock` behind blocks of any kind), "net2net" (an identity layer behind an idempotent activation),
            "netmorph" (a layer split in two), "copy" or "random" (which do not preserve the function).
        fade: over how many optimizer steps a gate opens that is closed at first: behind it the new block is a copy of its
            neighbour (or what `method` says), and the growth is exact whatever it is.
        layers: put an `outgrow.ResidualBlock` of so many layers there, two or more, rather than a block of the model's own.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     def forward(self, x):
        ...         return x + self.f(x)
        >>> model = nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2))
        >>> growth = deepen(model, torch.zeros(1, 3), "1", count=2)
        >>> len(model), growth.plan.renamed("2.weight")
        (5, '4.weight')
    """
    request = Deepen(after, count, method, fade, layers)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


def kernel(
    model: nn.Module,
    example: Example,
    where: str,
    size: int | Sequence[int],
    *,
    fade: int | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Enlarge the kernel of a convolution, without changing what the model computes: zeros around the old one.

    Args:
        where: the path of a convolution, of any kind.
        size: of the new kernel, one number or one an axis.
        fade: over how many optimizer steps what is new comes in, from zero to drawn values; without, it stays at zero until
            it has learned.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        >>> growth = kernel(model, torch.randn(1, 1, 8, 8), "0", size=5)
        >>> model[0]
        Conv2d(1, 4, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))
    """
    request = Kernel(where, size, fade)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


def branch(
    model: nn.Module,
    example: Example,
    beside: str,
    *,
    method: str = "auto",
    layers: int | None = None,
    hidden: int | None = None,
    fade: int | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Put a branch beside a module, m(x) → m(x) + b(x), without changing what the model computes: b is zero at first.

    Args:
        beside: the path of a layer or a stage that turns one tensor into another.
        method: "auto" or "r2r" (zero by pairs), "netmorph" (zero by its last layer); "copy" (of the module) and "random", which
            preserve the function only with `fade`.
        layers, hidden: build a branch of so many layers and hidden units; without, a copy of the module is made zero, or
            beside a single layer a branch of two is built.
        fade: over how many optimizer steps the branch sets in.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> growth = branch(model, torch.zeros(1, 3), "0", hidden=6)
        >>> growth.plan.renamed("0.weight"), sorted(model[0].state_dict())
        ('0.0.weight', ['0.bias', '0.weight', '1.0.bias', '1.0.weight', '1.2.bias', '1.2.weight'])
    """
    request = Branch(beside, method, layers, hidden, fade)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _several(given: object) -> list:  # type: ignore[type-arg]
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
