"""The growth that each entry of a model's parameters came with: cohort 0 was there from the start, cohort k came with growth k.

    birth of an entry = the latest of: its parameter's birth, and the births of its positions along the axes

A history of plans contains the positions that each growth added, counted at that time. It is read backwards, from the present
model: entries at the positions that a plan added, and parameters of the modules that it inserted, were born with that plan, and
are left out when the plans before it are read. Memory holds one array per grown axis; it is expanded on request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import nan, prod, sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outgrow.errors import GrowthError
from outgrow.growth_plan.plan import Insertion, Plan
from outgrow.history.growth_order import GrowthStep, histories_of, order_growths_of, undone
from outgrow.text.tables import table
from outgrow.wrong_arguments import usage

Positions = NDArray[np.int64]
SHOWN = 3  # volumes named for one growth


class Measure(NamedTuple):
    """A cohort's number of entries, and their root mean square."""

    entries: int
    rms: float


@dataclass(frozen=True, eq=False)
class Births:
    """The births of one tensor's entries: of the whole tensor, and of the positions along each axis that has grown since."""

    shape: tuple[int, ...]
    whole: int = 0
    axes: Mapping[int, Positions] = field(default_factory=dict)

    def expanded(self) -> Tensor:
        """A tensor that broadcasts to the shape."""
        result = torch.full([1] * len(self.shape), self.whole, dtype=torch.int32)
        for axis, births in self.axes.items():
            along = [-1 if a == axis else 1 for a in range(len(self.shape))]
            result = torch.maximum(result, torch.from_numpy(births.astype(np.int32)).view(along))
        return result

    def counts(self) -> dict[int, int]:
        """Entries by cohort."""
        found = [np.unique(births, return_counts=True) for births in self.axes.values()]
        rest = prod(size for axis, size in enumerate(self.shape) if axis not in self.axes)
        entries = reduce(np.multiply.outer, [counts for _, counts in found], np.array(rest))
        return {k: int(entries[cohort == k].sum()) for cohort in [self._kinds()] for k in np.unique(cohort).tolist()}

    def sums(self, values: Tensor) -> dict[int, float]:
        """The sum of values (a tensor of the same shape), by cohort."""
        rest = [axis for axis in range(values.ndim) if axis not in self.axes]
        values = values.sum(rest, keepdim=True) if rest else values
        for axis, births in self.axes.items():
            kinds, place = np.unique(births, return_inverse=True)
            shape = [len(kinds) if a == axis else size for a, size in enumerate(values.shape)]
            values = values.new_zeros(shape).index_add_(axis, torch.from_numpy(place).to(values.device), values)
        cohort, found = self._kinds().reshape(-1), values.cpu().double().numpy().reshape(-1)
        return {k: float(found[cohort == k].sum()) for k in np.unique(cohort).tolist()}

    def _kinds(self) -> Positions:
        """The cohort of each combination of births along the axes, in the axes' order."""
        kinds: Positions = reduce(np.maximum.outer, [np.unique(births) for births in self.axes.values()], np.array(self.whole))
        return kinds


@dataclass(frozen=True, eq=False)
class Cohorts:
    """The cohort of every entry; made by `cohorts`. `print` shows a table, `table(model)` adds root mean squares.

    cohorts[name] is an integer tensor that broadcasts to the parameter's shape. growths: one description per growth.
    """

    births: Mapping[str, Births] = field(repr=False)  # by name, tied tensors and buffers under all of their names
    parameters: tuple[str, ...] = field(repr=False)  # tied ones under their first name
    growths: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of growths: cohorts are 0 … count."""
        return len(self.growths)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.births:
            raise KeyError(f"{name}: the model has no such parameter")
        return self.births[name].expanded()

    def mask(self, name: str, cohort: int) -> Tensor:
        """A boolean tensor that marks a parameter's entries of one cohort; it broadcasts to the parameter's shape."""
        return self[name] == cohort

    def entries(self) -> dict[int, int]:
        """The number of parameter entries in each cohort."""
        counts = [self.births[name].counts() for name in self.parameters]
        return {k: sum(one.get(k, 0) for one in counts) for k in range(self.count + 1)}

    def norms(self, model: nn.Module) -> dict[int, Measure]:
        """Entries and root mean square of each cohort's values."""
        return self._measured(model, lambda parameter: parameter)

    def gradients(self, model: nn.Module) -> dict[int, Measure]:
        """Entries and root mean square of each cohort's gradients; parameters without a gradient are left out."""
        return self._measured(model, lambda parameter: parameter.grad)

    @torch.no_grad()
    def _measured(self, model: nn.Module, values_of: Callable[[nn.Parameter], Tensor | None]) -> dict[int, Measure]:
        total: dict[int, float] = dict.fromkeys(range(self.count + 1), 0.0)
        entries: dict[int, int] = dict.fromkeys(total, 0)
        for name, parameter in model.named_parameters():
            births, values = self.births.get(name), values_of(parameter)
            if births is None or births.shape != tuple(parameter.shape):
                raise GrowthError(f"{name} has changed since these cohorts were made: call outgrow.cohorts(model) again")
            if values is None:
                continue
            dense = values.to_dense() if values.is_sparse else values
            real = dense.abs() if dense.is_complex() else dense
            for cohort, square in births.sums(real.to(torch.promote_types(real.dtype, torch.float32)).square()).items():
                total[cohort] += square
            for cohort, count in births.counts().items():
                entries[cohort] += count
        return {k: Measure(entries[k], sqrt(total[k] / entries[k]) if entries[k] else nan) for k in total}

    def table(self, model: nn.Module) -> str:
        """Cohorts with the root mean squares of their values and gradients."""
        norms, gradients = self.norms(model), self.gradients(model)
        shown = [f"{one.rms:.2e}" if one.entries else "–" for one in gradients.values()]
        return self._table(("values", "gradients"), [(f"{norms[k].rms:.2e}", shown[k]) for k in norms])

    def __str__(self) -> str:
        return self._table((), [()] * (self.count + 1))

    def _table(self, header: Sequence[str], more: Sequence[Sequence[str]]) -> str:
        entries, names = self.entries(), ("there from the start", *self.growths)
        rows = [(k, f"{entries[k]:,}", *more[k], names[k]) for k in range(self.count + 1)]
        return table(("cohort", "entries", *header, "came with"), rows)


@usage("outgrow.cohorts(model)")
def cohorts(model: nn.Module) -> Cohorts:
    """Find the growth that each entry of a model's parameters came with.

    If parts of the model were grown separately too, the order of the growths follows from sizes and names. Where it does not,
    because the growths are independent of each other, growths of the whole model count as the later ones.

    Example:
        >>> import outgrow
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> growth = outgrow.widen(model, torch.zeros(1, 4), "0", to=12)
        >>> cohorts(model)["0.bias"].tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]
        >>> print(cohorts(model))
        cohort  entries  came with
        ──────  ───────  ────────────────────
        0       58       there from the start
        1       28       0 8 → 12
    """
    if not isinstance(model, nn.Module):
        raise GrowthError(f"the model is of type {type(model).__name__}: pass a torch.nn.Module")
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    tensors = dict(named)
    past = _Past({name: id(tensor) for name, tensor in tensors.items()}, {id(t): tuple(t.shape) for t in tensors.values()})
    steps = order_growths_of(model, histories_of(model))
    back = reversed(list(enumerate(steps or (), 1)))
    if steps is None or not all(past.undo(step, number) for number, step in back):
        raise GrowthError("the history of growths does not fit the model: was it changed by hand since?")
    keys = {key: past.births(key) for key in past.shapes}
    names = tuple(name for name, _ in model.named_parameters())
    return Cohorts(
        {name: keys[id(tensor)] for name, tensor in tensors.items()},
        names,
        tuple(_description(step.plans, step.place) for step in steps),
    )


class _Past:
    """Names and sizes of a model's tensors before its latest growths, and the births found while going back."""

    def __init__(self, names: Mapping[str, int], shapes: dict[int, tuple[int, ...]]) -> None:
        self.names, self.shapes = names, shapes
        self.where: dict[tuple[int, int], Positions] = {}  # tensor, axis → where its positions of that time stand now
        self.whole: dict[int, int] = {}
        self.axes: dict[tuple[int, int], Positions] = {}

    def undo(self, step: GrowthStep, number: int) -> bool:
        """Go back to the state before a growth; False if this growth can't have been the last one."""

        def born(key: int, edit: Insertion) -> bool:
            shape, axis = self.shapes[key], (key, edit.axis)
            positions = self.where.get(axis, np.arange(shape[edit.axis]) if edit.axis < len(shape) else np.arange(0))
            if len(positions) != edit.new_size:
                return False
            new = np.zeros(edit.new_size, dtype=np.bool_)
            new[list(edit.at)] = True
            self.axes.setdefault(axis, np.zeros(shape[edit.axis], dtype=np.int64))[positions[new]] = number
            self.where[axis] = positions[~new]
            return True

        before = undone(self.names, step.then, step.plans, born)
        if before is None:
            return False
        for key in set(self.names.values()) - set(before.values()):
            self.whole[key] = number
        self.names = before
        return True

    def births(self, key: int) -> Births:
        axes = {axis: self.axes[key, axis] for axis in range(len(self.shapes[key])) if (key, axis) in self.axes}
        return Births(self.shapes[key], self.whole.get(key, 0), axes)


def _description(plans: Sequence[Plan], place: str) -> str:
    """The changes of a growth as a short text."""
    changes = [f"{change.volume} {change.old} → {change.new}" for plan in plans for change in plan.changes]
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return (f"in {place}: " if place else "") + ", ".join(changes[:SHOWN]) + more
