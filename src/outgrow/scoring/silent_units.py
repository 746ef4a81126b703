"""How much new units would lower the loss where several layers write them: gated MLPs, heads, residual streams.

A copy of the model grows by units that are silent: their rows are zero in one of the writers (in all writers of a stream, where
new features are zero, or the mean under a layer norm), so that the loss does not change, whatever their columns Z are. The
gradient with respect to these rows is linear in the columns,

    ∂L/∂u_i = M_iᵀ z_i       one step of gradient descent with rate η lowers the loss by η Σ ‖M_iᵀ z_i‖²

    gated MLP   M_i = Σ_t δ_t φ(g_i·x_t) x_tᵀ          φ(g_i·x): the gate; u_i: the row of the other branch
    heads       M_i = Σ_t δ_t (Σ_s a_i(t, s) x_s)ᵀ     a_i: the attention of the head; u_i: a row of its values
    stream      M = [Σ_t δ_r,t κ_r,t x_w,tᵀ] for readers r and the writers w before them; κ: a norm's factor γ/σ

with δ the gradient at the outputs of readers and x the inputs of writers. The gates, queries and keys of new units are those of
existing ones, evenly spaced, as copies have them. The gain is the largest value for orthogonal columns of the existing columns'
mean norm r. For equal M_i it is r² Σ s_i(M)², as for plain volumes; in general, the steps

    Z ← r · polar(M_i M_iᵀ z_i)       (polar: the nearest matrix with orthonormal rows)

never lower it. M itself is never built: M_iᵀ z is the gradient of the rows, and M_i u the gradient of columns that are zero, at
small rows u. Units of all volumes of a kind are silent in the same copy, since each leaves the gradients of the others as they
are. Which writer may be zero is found by trying: the loss must stay the same, and of several the one with the largest gradient
is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.roles import READS, SCALES, WRITES
from outgrow.analysis.slot_positions import Irregular
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.engine.grow import grow
from outgrow.engine.preview import plan
from outgrow.errors import GrowthError, MethodError
from outgrow.growth_plan.plan import Plan
from outgrow.methods.mean_fill import MeanFill
from outgrow.methods.netmorph import NetMorph
from outgrow.model.batches import drawn_again
from outgrow.model.connections import NO_GRADIENT, Loss, check_finite, loss_of
from outgrow.model.example import Example
from outgrow.model.sandbox import tensors_of
from outgrow.model.walk_modules import module_at, set_mode
from outgrow.requests import Widen
from outgrow.scoring.new_entries import Entries, Runs, new_units, read_all, runs_of, write_all
from outgrow.trials.copies import copies_of

MOST = 8  # writers that are tried one by one
CONVERGED, ROUNDS = 0.002, 16
SMALL = 1e-3  # part of the usual size of rows
SAME = 1e-5  # relative difference of losses
ROUNDED = 1e-2  # the same in half precision
LOUD = (
    "new units with rows of zero in one of its writers, or in all of them, change the loss if their columns are not zero "
    "(in half precision, by rounding too)"
)
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


class NotSilent(Exception):
    """Why new units of a volume can't be made silent."""


@dataclass(eq=False)
class Silent:
    """New units of one volume. rows: of the writers that are zero; columns: of all readers; both have a row per entry."""

    volume: str
    rows: Sequence[Entries]
    columns: Sequence[Entries]
    zero: Tensor  # the rows at which the units are silent
    norm: float  # of existing columns, on average
    usual: float  # size of existing rows
    directions: Tensor  # present columns
    gradient: Tensor | None = None  # of the rows, at the present columns

    @property
    def gain(self) -> float:
        return 0.0 if self.gradient is None else float(self.gradient.double().square().sum())

    @property
    def values(self) -> tuple[float, ...]:
        """Singular values: of M, as far as the present columns reach them."""
        if self.gradient is None or not self.norm:
            return ()
        found: list[float] = (torch.linalg.svdvals(self.gradient.double()) / self.norm).tolist()
        return tuple(found)


@dataclass(eq=False)
class GrownCopy:
    """A copy of a model with new units, and what the loss does there."""

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss
    seed: int = 0

    @property
    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.model)

    def value(self) -> float:
        """The loss of the first batch, in eval mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        set_mode(self.model, False)
        try:
            with drawn_again(self.batches, self.seed), torch.no_grad():
                return next(float(loss_of(self.loss, self.model, batch)) for batch in self.batches)
        finally:
            for module, training in modes:
                module.training = training

    def gradients(self, names: Iterable[str], most: int | None = None) -> dict[str, Tensor]:
        """The mean gradient over (at most so many) batches, by name; without those of tensors that the loss does not use."""
        tensors = {name: tensor.requires_grad_() for name, tensor in self.tensors.items() if name in set(names)}
        total: dict[str, Tensor] = {}
        count = 0
        with drawn_again(self.batches, self.seed), torch.enable_grad():
            for batch in self.batches:
                value = loss_of(self.loss, self.model, batch)
                if not value.requires_grad:
                    raise MethodError(NO_GRADIENT)
                found = torch.autograd.grad(value.reshape(()), list(tensors.values()), allow_unused=True)
                for name, gradient in zip(tensors, found, strict=True):
                    if gradient is not None:
                        check_finite(gradient, name)
                        total[name] = gradient if name not in total else total[name] + gradient
                count += 1
                if count == most:
                    break
        return {name: total.get(name, torch.zeros_like(tensor)) / max(count, 1) for name, tensor in tensors.items()}


def silent_units(
    model: nn.Module, example: Example, wanted: Mapping[str, tuple[Volume, int]], batches: Iterable[Any], loss: Loss
) -> tuple[dict[str, Silent], dict[str, str]]:
    """New units of volumes, with their best columns and gradients, and reasons for the volumes that have none.

    wanted: volumes by name, each with its number of new units.
    """
    parts, refused = _possible(model, example, wanted)
    found: dict[str, Silent] = {}
    for part in parts:
        silent, reasons = _in_one_copy(model, example, part, batches, loss)
        found |= silent
        refused |= reasons
    return found, refused


def _in_one_copy(
    model: nn.Module, example: Example, requests: Mapping[str, Widen], batches: Iterable[Any], loss: Loss
) -> tuple[dict[str, Silent], dict[str, str]]:
    """New units of volumes that grow together, and reasons for those that can't be silent."""
    twin = copies_of(model, [])[0]
    before = GrownCopy(twin, batches, loss).value()
    growth = grow(twin, example, *requests.values(), check=False)
    anatomy, copy = dissect(twin, example), GrownCopy(twin, batches, loss)
    volumes = {volume.name: volume for volume in anatomy.volumes}
    found: dict[str, Silent] = {}
    refused: dict[str, str] = {}
    for name in requests:
        try:
            if name not in volumes:
                raise NotSilent("its name changes with its size")
            found[name] = _silence(copy, anatomy, volumes[name], growth.plan, before)
        except NotSilent as reason:
            refused[name] = str(reason)
        except Irregular:
            refused[name] = "its units are in no regular order"
    _improve(copy, list(found.values()))
    return found, refused


def _possible(
    model: nn.Module, example: Example, wanted: Mapping[str, tuple[Volume, int]]
) -> tuple[list[dict[str, Widen]], dict[str, str]]:
    """Requests, in parts that can be carried out together, and why others can't."""
    requests: dict[str, Widen] = {}
    refused: dict[str, str] = {}
    for name, (volume, new) in wanted.items():
        normed = [slot for slot in volume.slots if slot.role == SCALES and _is_batch_norm(model, slot.tensor)]
        if volume.form == "query":
            refused[name] = "new query heads read values that existing heads write, so that no row of theirs can start at zero"
        elif normed:
            refused[name] = (
                f"several tensors write it, and a batch norm ({normed[0].tensor}) divides rows of zero by their deviation"
            )
        else:
            requests[name] = Widen(name, by=new * volume.grain, method=NetMorph(zero="writers"))
    if not requests or _can_be_done(model, example, requests):
        return [requests] if requests else [], refused
    possible: dict[str, Widen] = {}
    for name, request in requests.items():
        try:
            possible[name] = _first_possible(model, example, request)
        except GrowthError as error:
            refused[name] = _reason(error)
    return _at_once(model, example, possible), refused


def _at_once(model: nn.Module, example: Example, requests: Mapping[str, Widen]) -> list[dict[str, Widen]]:
    """Requests in parts; the number of groups of channels and the size of a group, e.g., can't grow together."""
    if len(requests) < 2 or _can_be_done(model, example, requests):
        return [dict(requests)] if requests else []
    parts: list[dict[str, Widen]] = []
    for name, request in requests.items():
        for part in parts:
            if _can_be_done(model, example, {**part, name: request}):
                part[name] = request
                break
        else:
            parts.append({name: request})
    return parts


def _can_be_done(model: nn.Module, example: Example, requests: Mapping[str, Widen]) -> bool:
    try:
        plan(model, example, *requests.values())
    except GrowthError:
        return False
    return True


def _reason(error: GrowthError) -> str:
    reason = error.problems[0].reason if error.problems else str(error)
    return reason.replace("netmorph(zero='writers'): ", "new units can't be zero there: ")


def _first_possible(model: nn.Module, example: Example, request: Widen) -> Widen:
    """The request itself, or the same with the mean instead of zero, for streams under a layer norm."""
    try:
        plan(model, example, request)
        return request
    except MethodError:
        other = replace(request, method=MeanFill())
        with suppress(MethodError):
            plan(model, example, other)
            return other
        raise


def _is_batch_norm(model: nn.Module, tensor: str) -> bool:
    return isinstance(module_at(model, tensor.rpartition(".")[0]), BATCH_NORMS)


def _silence(copy: GrownCopy, anatomy: Anatomy, volume: Volume, made: Plan, before: float) -> Silent:
    """Make new units silent by zeros in one writer, or in all of them."""
    new = new_units(anatomy, volume, made)
    old = [unit for unit in range(volume.count) if unit not in set(new)]
    by_role = {role: [slot for slot in volume.slots if slot.role == role] for role in (WRITES, READS)}
    matrices = [runs_of(anatomy, volume, slot) for slot in by_role[WRITES] if not slot.vector]
    tied = {(runs.slot.tensor, runs.slot.axis) for runs in matrices}
    readers = [
        runs_of(anatomy, volume, slot) for slot in by_role[READS] if not slot.vector and (slot.tensor, slot.axis) not in tied
    ]
    if not matrices or not readers:
        raise NotSilent("no weight writes it" if not matrices else "no weight reads it but those that write it")
    grown = {slot.tensor: copy.tensors[slot.tensor].detach().clone() for slot in volume.slots}
    sources = [old[number * len(old) // len(new)] for number in range(len(new))]
    best: tuple[float, Silent, dict[str, Tensor]] | None = None
    dead = False
    for level in _levels(volume, matrices):
        for zeroed in level:
            _restore(copy, grown)
            if zeroed is not matrices:  # all of them are silent as they have grown
                _copy_rows(copy, anatomy, volume, by_role[WRITES], sources, new)
                _zero_rows(copy, volume, zeroed, new)
            here = _described(copy, volume.name, zeroed, readers, old, new)
            if not _keeps_loss(copy, here, before):
                continue
            gradient = read_all(here.rows, copy.gradients({one.tensor for one in here.rows}, most=1))
            size = float(gradient.double().square().sum())
            dead |= size == 0.0
            if size > (0.0 if best is None else best[0]):
                best = size, here, {name: copy.tensors[name].detach().clone() for name in grown}
        if best is not None:
            break
    _restore(copy, grown if best is None else best[2])
    if best is None:
        raise NotSilent("rows of zero get no gradient there, whatever the columns are" if dead else LOUD)
    return best[1]


def _keeps_loss(copy: GrownCopy, silent: Silent, before: float) -> bool:
    """Whether the loss is that of columns of zero, with two sets of columns: with one it may be the same by chance.

    Columns of zero have the loss of the model, up to the rounding of its precision: the growth scales weights around norms.
    """
    write_all(silent.columns, copy.tensors, torch.zeros_like(silent.directions))
    without = copy.value()
    if not math.isclose(without, before, rel_tol=ROUNDED, abs_tol=ROUNDED * 1e-2):
        return False
    for factor in (-3.0, 1.0):
        write_all(silent.columns, copy.tensors, factor * silent.directions)
        if not math.isclose(copy.value(), without, rel_tol=SAME, abs_tol=SAME * 1e-2):
            return False
    return True


def _levels(volume: Volume, matrices: Sequence[Runs]) -> list[list[Sequence[Runs]]]:
    """Which rows may be zero, in the order of trial: runs of one writer, whole writers, all writers."""
    singles: list[Sequence[Runs]] = [[one] for runs in matrices for one in runs.single]
    if volume.kind == "width" or len(singles) > MOST:
        return [[matrices]]
    return [singles, [[runs] for runs in matrices if len(runs.single) > 1], [matrices]]


def _restore(copy: GrownCopy, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            copy.tensors[name].copy_(value)


def _copy_rows(
    copy: GrownCopy, anatomy: Anatomy, volume: Volume, slots: Sequence[Any], sources: Sequence[int], new: Sequence[int]
) -> None:
    """Rows and biases of existing units for new ones."""
    for slot in slots:
        runs = runs_of(anatomy, volume, slot)
        runs.whole(new).write(copy.tensors, runs.whole(sources).read(copy.tensors))


def _zero_rows(copy: GrownCopy, volume: Volume, zeroed: Sequence[Runs], new: Sequence[int]) -> None:
    """Zero the rows of new units in some writers, and the entries of biases that belong to them."""
    for runs in zeroed:
        rows, path = runs.whole(new), runs.slot.tensor.rpartition(".")[0]
        rows.write(copy.tensors, 0.0)
        for slot in volume.slots:
            if slot.role == WRITES and slot.vector and slot.tensor.rpartition(".")[0] == path:
                Entries(slot.tensor, slot.axis, rows.positions).write(copy.tensors, 0.0)


def _described(
    copy: GrownCopy, name: str, zeroed: Sequence[Runs], readers: Sequence[Runs], old: Sequence[int], new: Sequence[int]
) -> Silent:
    """Rows and columns of new units, entry by entry if each entry has its own columns; random columns."""
    rows: list[Entries] | None = None
    columns: Sequence[Entries | None] = []
    earlier: Sequence[Entries | None] = []
    if len(zeroed) == 1 and len(zeroed[0].tables) == 1:
        runs, _, length = zeroed[0].tables[0].shape
        columns, earlier = ([reader.split(units, runs, length) for reader in readers] for units in (new, old))
        rows = [zeroed[0].rows(new)]
    if rows is None or None in columns:
        rows = [one.whole(new) for one in zeroed]
        columns, earlier = ([reader.whole(units) for reader in readers] for units in (new, old))
    new_columns, old_columns = ([one for one in each if one is not None] for each in (columns, earlier))
    existing = read_all(old_columns, copy.tensors)
    norm = float(existing.double().norm(dim=1).mean())
    written = read_all([one.whole(old) for one in zeroed], copy.tensors).double()
    usual = float(written.norm() / math.sqrt(max(len(old), 1)))
    generator = torch.Generator().manual_seed(copy.seed)
    drawn = torch.randn(len(new_columns[0].positions), existing.shape[1], generator=generator, dtype=existing.dtype)
    return Silent(name, rows, new_columns, read_all(rows, copy.tensors), norm, usual, norm * polar(drawn))


def polar(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows; with orthonormal columns, if there are fewer columns than rows."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    result: Tensor = (left @ right).to(matrix)
    return result


def _improve(copy: GrownCopy, silent: Sequence[Silent]) -> None:
    """Turn columns towards those with the largest gain, until no gain grows by more than 0.2%."""
    rows = {entries.tensor for one in silent for entries in one.rows}
    columns = {entries.tensor for one in silent for entries in one.columns}
    for _ in range(ROUNDS if silent else 0):
        for one in silent:
            write_all(one.rows, copy.tensors, one.zero)
            write_all(one.columns, copy.tensors, one.directions)
        found, gains = copy.gradients(rows), [one.gain for one in silent]
        for one in silent:
            one.gradient = read_all(one.rows, found)
        if all(one.gain <= (1 + CONVERGED) * before for one, before in zip(silent, gains, strict=True)):
            break
        for one in silent:
            step = one.gradient if one.gradient is not None else one.zero
            largest = max(float(step.norm(dim=1).max()), 1e-300)
            write_all(one.rows, copy.tensors, one.zero + step * (SMALL * max(one.usual, 1e-6) / largest))
            write_all(one.columns, copy.tensors, torch.zeros_like(one.directions))
        back = copy.gradients(columns)
        for one in silent:
            turned = read_all(one.columns, back)
            if bool(turned.any()):
                one.directions = one.norm * polar(turned)
