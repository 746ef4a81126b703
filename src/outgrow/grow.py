"""Grow a model: the whole story on one page.

    trace → volumes → plan → fit → apply → verify

Each arrow is a module. Until `apply` nothing is touched (but for `residual="fold"`, which sets a volume apart before it is
planned); from there a journal can put everything back, and does on any failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from outgrow import verify
from outgrow.admit import check_averages, check_model, check_seed
from outgrow.anatomy import dissect
from outgrow.apply import Journal, apply_plan
from outgrow.draft import inits_of
from outgrow.errors import GrowthError
from outgrow.flops import count_flops
from outgrow.graft import apply_grafts
from outgrow.methods import Method
from outgrow.plan import Plan
from outgrow.predict import Prediction
from outgrow.sandbox import random_state, tensors_of
from outgrow.settle import settle
from outgrow.trace import Example
from outgrow.training.history import remember
from outgrow.training.optimizer import grow_optimizers, watch_for_stale
from outgrow.transforms.fold import fold_residuals
from outgrow.transforms.widen import Skip, Widen


@dataclass(eq=False)
class Growth:
    """What a growth did. `print(growth)` shows it as a table.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth = widen(model, torch.zeros(1, 4), "0", to=12)
        >>> growth.parameters, growth.preserving, growth.max_error <= growth.tolerance
        ((58, 86), True, True)
    """

    model: nn.Module = field(repr=False)
    plan: Plan = field(repr=False)
    max_error: float
    tolerance: float
    skipped: tuple[Skip, ...]
    parameters: tuple[int, int]
    flops: tuple[int, int]
    seconds: float
    preserving: bool = True
    stochastic: bool = False

    def __str__(self) -> str:
        lines = [str(self.plan), ""]
        for what, (before, after) in (("parameters", self.parameters), ("FLOPs", self.flops)):
            lines.append(f"{what}: {before:,} → {after:,} (× {after / max(before, 1):.2f})")
        if not self.preserving:
            lines.append(f"error: {self.max_error:.1e}: this method does NOT preserve the function")
        elif self.tolerance:
            lines.append(f"error: {self.max_error:.1e} (the network's own rounding allows {self.tolerance:.1e})")
        else:
            lines.append("error: not checked")
        if self.stochastic:
            lines.append("dropout is active in training: there the function is kept in expectation, exactly with dropout off")
        if self.skipped:
            lines.append(f"left as they are: {len(self.skipped)} volumes")
            lines.extend(f"  {skip}" for skip in self.skipped)
        return "\n".join(lines)

    __repr__ = __str__


def grow(
    model: nn.Module,
    example: Example,
    *transforms: Widen,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Carry out several transforms as one: all of them or none.

    Args:
        model: any module that runs on the example; it is changed in place.
        example: a tensor, a tuple of arguments, or a dict of keyword arguments.
        transforms: what to grow, e.g. `outgrow.Widen("layer1.*", factor=1.5)`.
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
    strangers = [transform for transform in transforms if not isinstance(transform, Widen)]
    if strangers:
        raise GrowthError(f"{strangers[0]!r} is no transform: write e.g. outgrow.Widen('*', factor=1.5)")
    started = time.perf_counter()
    optimizers, averages = _several(optimizer), _several(average)
    check_seed(seed)
    with random_state():
        check_model(model)
        check_averages(averages, model)
        base, limits = verify.before(model, example) if check else (None, (0.0, 0.0))
        anatomy = dissect(model, example, both_modes=base is not None and base.draws)
        before = _parameters(model)
        journal = Journal()
        try:
            anatomy, requests, grafts = fold_residuals(model, example, anatomy, transforms, journal)
            choices, skipped, plan = settle(model, example, anatomy, requests, seed)
            plan = replace(plan, grafts=grafts)
            prediction = Prediction(anatomy, choices)
            shape = [value.shape for value in anatomy.reading.trace.values]
            flops = count_flops(anatomy.reading.trace, shape.__getitem__), count_flops(anatomy.reading.trace, prediction.shape)
            preserving = all(choice.method.exact for choice in choices)
            inits = inits_of(choices)
            olds = {id(tensor): tensor.detach() for tensor in tensors_of(model).values()}
            apply_plan(model, plan, inits, journal)
            grow_optimizers(optimizers, model, plan, olds, journal)
            for copy in (getattr(average, "module", average) for average in averages):
                apply_grafts(copy, plan, journal)
                apply_plan(copy, plan, inits, journal)
            worst, allowed = float("nan"), 0.0
            if base is not None:
                worst, allowed = verify.check(model, example, base, limits, preserving)
        except BaseException:
            journal.undo()
            raise
        journal.close()
    remember(model, plan)
    watch_for_stale(model, plan, optimizers)
    dropout = any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())
    return Growth(
        model,
        plan,
        worst,
        allowed,
        tuple(skipped),
        (before, _parameters(model)),
        flops,
        time.perf_counter() - started,
        preserving,
        dropout or (base is not None and base.drops),
    )


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

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(widen(model, torch.zeros(1, 4), "0", factor=1.5, method="r2r").plan)
        volume  units   method
        ──────  ──────  ──────
        0       8 → 12  r2r
    """
    request = Widen(where, factor, by, to, method, residual)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _several(given: object) -> list:  # type: ignore[type-arg]
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
