"""Learned initialisation: free values that are computed from batches of data instead of drawn.

A new unit has a row u in its writer and a column z in its readers. With M = Σ (∂L/∂ reader's output)·(writer's input)ᵀ, the
mixed derivative of the loss in z and u (see `model/connections.py`), and M = Σ s_i a_i b_iᵀ:

    GradMax   z = −a_i, u = b_i       the largest gradient of any units with columns and rows of these norms
    North     u ⟂ all rows            in the input space, or in the space of what the units compute on the batches

Columns and rows have the mean norm of the existing ones. A method uses those of the two that it leaves free: R2R reads a pair
as z and −z, NetMorph uses either z or u. References: U. Evci et al., 2022: GradMax: Growing neural networks using gradient
information; K. Maile et al., 2022: When, where, and how to add new neurons to ANNs (NORTH).
"""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outgrow.errors import MethodError
from outgrow.model.connections import Loss, Observed, check_batches
from outgrow.wrong_arguments import usage

RANK = 1e-6  # singular values below this part of the largest one are rounding
SEEN = 1e-6  # directions with less than this part of the largest variance do not occur in the batches


@dataclass(frozen=True, eq=False)
class LearnedInit(abc.ABC):
    """Base of learned initialisations, for `init=`."""

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def wants(self) -> tuple[str, ...]:
        """What is collected on the batches: fields of `Observed`; nothing if no batches are needed."""

    @property
    @abc.abstractmethod
    def sides(self) -> tuple[str, ...]:
        """What it computes: "rows", "columns", or both."""

    @abc.abstractmethod
    def directions(
        self, seen: Observed, rows: Tensor, columns: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        """Rows and columns of `count` new units; None for values that are drawn. rows, columns: those of the existing units."""


@usage("outgrow.GradMax(batches, lambda model, batch: criterion(model(batch[0]), batch[1]))")
@dataclass(frozen=True, eq=False, repr=False)
class GradMax(LearnedInit):
    """New units with the largest gradient: singular vectors of the gradient of a direct connection.

    batches: a list of batches, or a DataLoader. loss: a function of (model, batch) that returns the loss; it is called once per
    batch, at the growth. rows: "matching" (the right singular vectors) or "drawn".

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> batches = [(torch.randn(16, 4), torch.randn(16, 2))]
        >>> how = outgrow.R2R(init=GradMax(batches, lambda model, batch: (model(batch[0]) - batch[1]).square().mean()))
        >>> outgrow.widen(model, batches[0][0], "0", to=10, method=how).preserving
        True
    """

    batches: Iterable[Any]
    loss: Loss
    rows: str = "matching"
    name: ClassVar[str] = "gradmax"

    def __post_init__(self) -> None:
        check_batches(self.batches, self.loss, "outgrow.GradMax(batches, loss)")
        if self.rows not in ("matching", "drawn"):
            raise MethodError(f"rows={self.rows!r}: write 'matching' or 'drawn'")

    def __repr__(self) -> str:
        return "GradMax(…)" if self.rows == "matching" else f"GradMax(…, rows={self.rows!r})"

    @property
    def wants(self) -> tuple[str, ...]:
        return ("matrix",)

    @property
    def sides(self) -> tuple[str, ...]:
        return ("rows", "columns") if self.rows == "matching" else ("columns",)

    def directions(
        self, seen: Observed, rows: Tensor, columns: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        assert seen.matrix is not None
        left, values, right = singular(seen.matrix)
        rank = int((values > RANK * values[0]).sum()) if values[0] > 0 else 0
        if not rank:
            raise MethodError("the gradient of the loss is zero there, so no direction is better than another")
        mix = torch.randn(count, rank, dtype=torch.float64, generator=generator) * values[:rank]
        mix[:rank] = torch.eye(min(count, rank), rank, dtype=torch.float64)  # the rest: random mixtures of the directions
        new_columns = -_scaled(mix @ left[:, :rank].T, columns)
        new_rows = _scaled((mix * values[:rank]) @ right[:, :rank].T, rows)
        return (new_rows if self.rows == "matching" else None), new_columns


@usage("outgrow.North()")
@dataclass(frozen=True, eq=False, repr=False)
class North(LearnedInit):
    """New units with rows that are orthogonal to all existing rows and to each other; columns are those of the method.

    batches, loss: if given, as in `outgrow.GradMax`: what the new units compute on the batches, before their activation, is
    then orthogonal to what the existing units compute. Where the rows span all inputs already, the least covered directions
    are taken.

    Example:
        >>> import torch, outgrow
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> growth = outgrow.widen(model, torch.randn(1, 8), "0", to=6, method=outgrow.NetMorph(init=North()))
        >>> products = model[0].weight @ model[0].weight[4:].T
        >>> bool(products[:4].abs().max() < 1e-6)
        True
    """

    batches: Iterable[Any] | None = None
    loss: Loss | None = None
    name: ClassVar[str] = "north"

    def __post_init__(self) -> None:
        if self.batches is not None or self.loss is not None:
            check_batches(self.batches, self.loss, "outgrow.North(batches, loss)")

    def __repr__(self) -> str:
        return "North()" if self.batches is None else "North(…)"

    @property
    def wants(self) -> tuple[str, ...]:
        return () if self.batches is None else ("inputs",)

    @property
    def sides(self) -> tuple[str, ...]:
        return ("rows",)

    def directions(
        self, seen: Observed, rows: Tensor, columns: Tensor, count: int, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor | None]:
        old = rows.double().cpu()
        basis = torch.eye(old.shape[1], dtype=torch.float64)
        if seen.inputs is not None:  # orthogonal in the metric of the inputs' second moments
            variances, axes = torch.linalg.eigh(seen.inputs.double().cpu())
            kept = variances > SEEN * variances[-1]
            if not bool(kept.any()):
                raise MethodError("all of its inputs are zero on the batches, so no direction is known")
            basis = axes[:, kept] / variances[kept].sqrt()  # columns: inputs of which each has mean square one
            metric = seen.inputs.double().cpu()
            old = old @ metric @ basis
        else:
            old = old @ basis
        found = uncovered(old, count, generator)
        return _scaled(found @ basis.T, rows), None


def singular(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular vectors as columns, and values, in double precision. Signs: the largest entry of a right vector is positive."""
    left, values, right = torch.linalg.svd(matrix.double().cpu(), full_matrices=False)
    right = right.T
    largest = right.gather(0, right.abs().argmax(0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(torch.float64)
    return left * signs, values, right * signs


def uncovered(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Orthonormal directions that rows cover least; if more are needed than there are, random orthonormal ones follow."""
    size = rows.shape[1]
    covered, axes = torch.linalg.eigh(rows.T @ rows)  # ascending
    empty = int((covered <= RANK**2 * covered[-1].clamp(min=1e-300)).sum())
    if empty > 1:  # any directions there are orthogonal to all rows
        turn = torch.linalg.qr(torch.randn(empty, empty, dtype=torch.float64, generator=generator))[0]
        axes = torch.cat([axes[:, :empty] @ turn, axes[:, empty:]], dim=1)
    found = axes.T
    while len(found) < count:
        found = torch.cat([found, torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]])
    result: Tensor = found[:count]
    return result


def _scaled(directions: Tensor, like: Tensor) -> Tensor:
    """Directions with the mean norm of existing rows or columns."""
    norm = like.double().norm(dim=1).mean().cpu()
    result: Tensor = directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-300) * norm
    return result


def learned_name(init: LearnedInit, tensor: str, axis: int) -> str:
    """The name of learned values in a plan."""
    return f"{init.name}/{tensor}/{axis}"
