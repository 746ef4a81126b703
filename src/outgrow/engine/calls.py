"""Public calls for a growth by one transform: `widen`, `deepen`, `kernel` and `branch`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from outgrow.engine.grow import grow
from outgrow.engine.growth_report import Growth
from outgrow.methods.base import Method
from outgrow.model.example import Example
from outgrow.requests import Branch, Deepen, Kernel, Widen
from outgrow.wrong_arguments import usage


@usage("outgrow.widen(model, example, '*', factor=1.5)")
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
    kind: str | None = None,
    outputs: str | int | Sequence[str | int] | None = None,
    unit: str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Add units to the volumes that `where` selects, without changing what the model computes.

    Args:
        where: names or globs; a pattern selects a volume if it matches its name, or the path of every module that writes it.
        factor: the ratio of the new size to the old one, rounded to the nearest size that the volume and the method allow;
            "auto" takes a method that reaches size × factor if that is a whole number and there is one.
        by: the number of units to add; pass exactly one of `factor`, `by` and `to`.
        to: the new number of units.
        method: "auto", "r2r", "net2net", "netmorph", "mean", "random", or an instance such as `outgrow.R2R(init="he")`.
        residual: "stream" widens whole residual streams; "fold" is the paper's folded residual: `where` names a module
            that writes a stream, and only the volume it writes is widened; its skips go through an `outgrow.Fold`.
        fade: the number of optimizer steps in which new units fade in: their weights are drawn, and the weights that read them
            go from zero to drawn values. Where that would not be exact, `method="auto"` takes a method without a fade.
        kind: widen only volumes of this kind: "mlp" (hidden units of blocks), "heads", "head_dim", "width" (streams),
            "experts", "vocab" or "outputs"; `outgrow.volumes(model, example)` shows the kind of each volume.
        outputs: the outputs of the model that have to be preserved, by key, attribute or position, such as "logits"; others
            may change their size and are not compared. Without it, all outputs are preserved.
        unit: for kind="heads" where query heads share keys and values: "group" (whole groups) or "query" (more query heads
            in each group); by default the form that reaches the size, groups if both do.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> print(widen(model, torch.zeros(1, 4), "0", factor=1.5, method="r2r").plan)
        volume  size    method
        ──────  ──────  ──────
        0       8 → 12  r2r
    """
    request = Widen(where, factor, by, to, method, residual, fade, kind, outputs, unit)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


@usage("outgrow.deepen(model, example, 'layer3.1')")
def deepen(
    model: nn.Module,
    example: Example,
    after: str = "",
    *,
    count: int = 1,
    method: str = "auto",
    fade: int | None = None,
    layers: int | None = None,
    order: str = "interleave",
    stack: str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    average: nn.Module | Sequence[nn.Module] | None = None,
    seed: int = 0,
    check: bool = True,
) -> Growth:
    """Put new blocks behind the module `after`, or into a whole stack, without changing what the model computes.

    Args:
        after: the path of a block; `outgrow.places(model, example)` lists the blocks that a new one can follow.
        count: the number of new blocks.
        method: "auto" or "r2r" (a copy of a block whose branches are made zero; behind plain layers an
            `outgrow.ResidualBlock`), "r2r-paper" (the same, also where branches end in a batch norm), "residual" (an
            `outgrow.ResidualBlock` behind blocks of any kind), "net2net" (an identity layer behind an idempotent activation),
            "netmorph" (a layer split in two), "copy" or "random" (which do not preserve the function).
        fade: the number of optimizer steps in which a gate opens that is closed at first: behind it the new block is a copy of
            its neighbour (or follows `method`), and the growth is exact for any block.
        layers: without `after`, the new number of blocks of the model's stack; with it, insert an `outgrow.ResidualBlock` with
            this number of layers, two or more, instead of a copy of a block.
        order: of the blocks of a stack and their copies: "interleave" (a a b b) or "stack" (a b a b).
        stack: the path of the stack, such as "encoder.layers", if the model has several.

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
    request = Deepen(after, count, method, fade, layers, order, stack)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


@usage("outgrow.kernel(model, example, 'conv1', 5)")
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
        size: of the new kernel, one number or one per axis.
        fade: the number of optimizer steps in which the new entries go from zero to drawn values; without it, they start at
            zero and learn from there.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
        >>> growth = kernel(model, torch.randn(1, 1, 8, 8), "0", size=5)
        >>> model[0]
        Conv2d(1, 4, kernel_size=(5, 5), stride=(1, 1), padding=(2, 2))
    """
    request = Kernel(where, size, fade)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)


@usage("outgrow.branch(model, example, 'layer2')")
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
        layers: build a branch with this number of layers; without `layers` and `hidden`, a copy of the module is made zero, or
            beside a single layer a branch of two layers is built.
        hidden: the number of hidden units of that branch.
        fade: the number of optimizer steps in which the branch fades in.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> growth = branch(model, torch.zeros(1, 3), "0", hidden=6)
        >>> growth.plan.renamed("0.weight"), sorted(model[0].state_dict())
        ('0.0.weight', ['0.bias', '0.weight', '1.0.bias', '1.0.weight', '1.2.bias', '1.2.weight'])
    """
    request = Branch(beside, method, layers, hidden, fade)
    return grow(model, example, request, optimizer=optimizer, average=average, seed=seed, check=check)
