"""One column of the comparison: what a method needs and does at a place, found by growing a copy of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from outgrow.analysis.analyse import dissect
from outgrow.analysis.slot_positions import irregular
from outgrow.analysis.unit_states import State, Verdict
from outgrow.analysis.volumes import Anatomy, Volume
from outgrow.comparing.dropout_masks import random_module
from outgrow.comparing.measure import changed, drawn, free_parameters, grown_copy, rotations
from outgrow.comparing.operators_between import Operator, UnitPath, unit_path
from outgrow.comparing.symmetry_breaking import EQUAL, PART, parting_in, parting_within
from outgrow.engine.growth_report import Growth
from outgrow.errors import GrowthError, VerifyError
from outgrow.exactness.identity_blocks import Identity, SkipConnection, dissect_alone, identity_of
from outgrow.exactness.propagate_states import judge
from outgrow.exactness.zero_output import NotZero
from outgrow.methods.base import Method
from outgrow.methods.net2net import Net2Net
from outgrow.methods.netmorph import NetMorph
from outgrow.methods.r2r import R2R
from outgrow.model.example import Example
from outgrow.model.module_calls import Call, calls_of
from outgrow.requests import Deepen, Widen

MORE = 16  # factor on the number of new units, if the first few get no gradient
NEEDS = {
    State.PAIR: "units alike and apart",
    State.COPY: "units alike and apart",
    State.ANY: "units apart",
    State.ZERO: "ψ(0) = 0 and units apart",
}


@dataclass(frozen=True)
class Column:
    """What one method needs and does at the place; empty or None where it was refused, or where it can't be determined."""

    method: str
    needs: str  # what the operators there must do
    unmet: tuple[str, ...] | None = None  # operators that do not; None if none were tested
    instead: str = ""  # what makes it exact nevertheless
    refused: str = ""  # why it is refused there
    tried: str = ""  # what was done to the copy
    preserving: str = ""  # "yes", "in expectation" or "no"
    chance: str = ""  # the module whose random values differ between units that must stay equal
    max_error: float | None = None  # with dropout off
    tolerance: float | None = None
    parting: str = ""  # new units "part" in training, or "stay equal", or "get no gradient"
    residual: str = ""
    free: int | None = None  # new parameters that are chosen freely
    new: int | None = None  # all new parameters
    changed: tuple[str, ...] = ()  # existing tensors, and float attributes of modules (ε), that change
    amount: str = ""  # how many new channels, or layers, there can be

    @property
    def noise(self) -> bool | None:
        """Whether new units need noise to become different; None if that can't be determined here."""
        return {EQUAL: True, PART: False}.get(self.parting)


@dataclass(frozen=True, eq=False)
class ComparedVolume:
    """A volume of a model, and the operators between its writers and readers."""

    model: nn.Module
    example: Example
    anatomy: Anatomy
    trained: Anatomy  # traced in train mode too
    volume: Volume
    path: UnitPath


def compared_volume(model: nn.Module, example: Example, anatomy: Anatomy, volume: Volume) -> ComparedVolume:
    trained = dissect(model, example, both_modes=True)
    return ComparedVolume(model, example, anatomy, trained, volume, unit_path(model, example, volume))


def widening(place: ComparedVolume, method: Method) -> Column:
    """The column of a method that adds units to a volume."""
    volume = place.volume
    verdict = judge(place.anatomy, volume, method.state)
    step = volume.count if verdict.multiples else method.step
    column = Column(
        method.name,
        NEEDS[method.state],
        _unmet(place.path, method.state),
        amount=_amount(step * volume.grain, verdict.multiples),
    )
    column = replace(column, residual=_stream(place, method))
    problem = irregular(place.anatomy, volume)
    reason = volume.pinned or (problem.reason if problem is not None else verdict.refusal)
    if reason:
        return replace(column, refused=reason)
    request = Widen(
        volume.name, by=max(step, 2) * volume.grain, method=method
    )  # at least two units, so that they can be compared
    try:
        growth = grown_copy(place.model, place.example, request)
    except GrowthError as error:
        return _refused(column, error)
    column = replace(_measured(column, place.model, growth), parting=_parting(place, request, growth))
    free, new = drawn(growth)
    column = replace(column, free=free, new=new, tried=f"{growth.plan.changes[0].old} → {growth.plan.changes[0].new}")
    column = replace(column, instead=_instead(verdict, free) if column.unmet else "")
    there = [other for other in place.trained.volumes if other.name == volume.name]
    return _by_chance(column, random_module(place.trained, there[0], method.state) if there else None)


def _unmet(path: UnitPath, state: State) -> tuple[str, ...]:
    """Operators that do not meet what a method needs."""
    if state in (State.PAIR, State.COPY):
        return tuple(str(operator) for operator in path.operators if not (operator.alike and operator.apart))
    lost = state is State.ZERO and not path.zero
    return tuple(str(operator) for operator in path.operators if not operator.apart or (lost and not operator.zero))


def _instead(verdict: Verdict, free: int) -> str:
    if verdict.multiples:
        return "as whole copies of all units"
    if verdict.rescales or verdict.eps:
        return "with γ and ε corrected"
    return "" if free else "with zero readers too"


def _amount(least: int, copies: bool) -> str:
    shown = {1: "any", 2: "even"}.get(least, f"multiples of {least:,}")
    return f"multiples of {least:,}: whole copies" if copies else shown


def _stream(place: ComparedVolume, method: Method) -> str:
    """Whether sums tie the volume's writers, and whether one writer can be widened without the others."""
    sums, volume = len(place.path.sums), place.volume
    if not sums:
        return "none here"
    shown = f"{sums} {'sum' if sums == 1 else 'sums'}: all summands grow"
    if not isinstance(method, (R2R, Net2Net, NetMorph)) or volume.pinned or not volume.writers:
        return shown
    fold = Widen(volume.writers[0], by=2 * volume.grain, method=method, residual="fold")
    try:
        alone = bool(grown_copy(place.model, place.example, fold).plan.grafts)
    except GrowthError:
        alone = False
    return f"{shown}, or {volume.writers[0]} alone (residual='fold')" if alone else shown


def _parting(place: ComparedVolume, request: Widen, growth: Growth) -> str:
    """Whether new units become different in training; tried with more units if the first few get no gradient."""
    found = parting_in(growth.model, place.example, place.volume.name, place.volume.count)
    if found in (PART, EQUAL) or (request.by or 0) >= place.volume.size:
        return found
    try:
        more = grown_copy(place.model, place.example, replace(request, by=MORE * (request.by or 1)))
    except GrowthError:
        return found
    return parting_in(more.model, place.example, place.volume.name, place.volume.count)


def _measured(column: Column, model: nn.Module, growth: Growth) -> Column:
    return replace(
        column, preserving="yes", max_error=growth.max_error, tolerance=growth.tolerance, changed=changed(model, growth)
    )


def _by_chance(column: Column, module: str | None) -> Column:
    return column if module is None else replace(column, preserving="in expectation", chance=module or "the model")


def _refused(column: Column, error: GrowthError) -> Column:
    reason = "; ".join(problem.reason for problem in error.problems) or str(error).splitlines()[0]
    if isinstance(error, VerifyError):
        return replace(column, preserving="no", refused=str(error).splitlines()[0])
    return replace(column, refused=reason)


def deepening(model: nn.Module, example: Example, where: str, method: str, last: Operator | None) -> Column:
    """The column of a method that inserts a block after a module; `last` is the module's final activation."""
    needs = {
        "r2r": "units alike, ψ(b) = 0 for some b at the end",
        "net2net": "one with ψ(ψ(x)) = ψ(x)",
        "netmorph": "nothing: none comes in between",
    }
    column = Column(method, needs[method])
    if method == "net2net":
        column = replace(column, unmet=() if last and last.idempotent else (str(last) if last else "there is none",))
    try:
        growth = grown_copy(model, example, Deepen(where, method=method))
    except GrowthError as error:
        return _refused(column, error)
    column = _measured(column, model, growth)
    path = growth.plan.new_blocks[0]
    block = growth.model.get_submodule(path)
    given = calls_of(growth.model, example, [path])[path][0]
    layers = sum(any(p.ndim > 1 for p in module.parameters(recurse=False)) for module in block.modules())
    column = replace(
        column,
        tried=f"a new {type(block).__name__}",
        residual="brings one" if _has_skip(block, given) else "none",
        free=rotations(growth.plan),
        new=growth.parameters[1] - growth.parameters[0],
        amount=f"{layers} at a time" if layers > 1 else "any",
    )
    column = _with_zero_branches(column, block, given) if method == "r2r" else column
    return replace(column, parting=parting_within(growth.model, example, path))  # last, since it trains the copy


def _has_skip(block: nn.Module, given: Call) -> bool:
    """Whether the block's input reaches its output through sums."""
    try:
        anatomy = dissect_alone(block, given)
        start = next(value.index for value in anatomy.reading.trace.values if value.kind == "input")
        return bool(SkipConnection(anatomy, start).branches(next(iter(anatomy.reading.trace.outputs))))
    except NotZero:
        return False


def _with_zero_branches(column: Column, block: nn.Module, given: Call) -> Column:
    """Complete the column of R2R's new block: needs and free parameters follow from how its branches were made zero."""
    identity: Identity = identity_of(block, given)
    free, _ = free_parameters(block, identity.anatomy, identity.zeroing)
    column = replace(column, free=free)
    pairings = identity.zeroing.pairings
    if not pairings:
        return replace(column, needs="nothing: γ = β = 0 ends the branch")
    unmet: dict[str, None] = {}
    trained = dissect(block, given.example, both_modes=True)
    for pairing in pairings:
        way = unit_path(block, given.example, pairing.volume)
        unmet.update(dict.fromkeys(str(operator) for operator in way.operators if not operator.alike))
        for volume in (volume for volume in trained.volumes if volume.name == pairing.volume.name):
            column = _by_chance(column, random_module(trained, volume, State.PAIR))
    return replace(column, unmet=tuple(unmet))
