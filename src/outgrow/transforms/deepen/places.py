"""List the places where a model can be deepened, the exact methods there, and reasons against the others, by trying them.

Trials run on a copy of the model on the meta device (see `model/meta_copy.py`), where a pass costs no arithmetic, and once per
kind of block. The model itself runs only where that leaves doubts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from outgrow.analysis.analyse import dissect, without_values
from outgrow.analysis.volumes import Anatomy
from outgrow.apply.apply_plan import apply_setting
from outgrow.apply.carry_out_insert import put_in
from outgrow.errors import ExampleError, TraceError
from outgrow.exactness.zero_output import NotZero
from outgrow.growth_plan.plan import Plan, joined
from outgrow.model.check_arguments import check_module
from outgrow.model.compiled import uncompiled
from outgrow.model.example import Example, outputs_in
from outgrow.model.journal import Journal
from outgrow.model.known_values import on_meta
from outgrow.model.meta_copy import has_values, tensors_on_meta
from outgrow.model.module_calls import Call, calls_of
from outgrow.model.module_paths import joined_path
from outgrow.model.unwrap import bare
from outgrow.process.garbage_collection import without_garbage_collection
from outgrow.requests import Deepen
from outgrow.trace.operators import Trace
from outgrow.trace.record import record
from outgrow.transforms.deepen.new_layers import Neighbours, legal, unwrappable
from outgrow.transforms.deepen.own_kind import (
    NOT_RUN,
    OWN_KIND_METHODS,
    SiblingKinds,
    Template,
    blocks_and_layers,
    containers,
    own_kind,
    template_for,
)
from outgrow.transforms.deepen.runs_as_before import runs_as_before, within
from outgrow.transforms.site_and_step import trial
from outgrow.wrong_arguments import usage

CODE_ERRORS = (TypeError, AttributeError)  # errors of code that expects another module, whatever the values
NO_VALUES = (
    "on the meta device it can't be checked that one more block there leaves the outputs unchanged: load the weights first"
)


@dataclass(frozen=True)
class Place:
    """A place where a model can be deepened: behind the module `name`.

    methods: those that keep the function there; if there are none, `reason` says why. own: the block that "r2r" inserts there
    is a copy of one of the model's own blocks.
    """

    name: str
    methods: tuple[str, ...]
    reason: str = ""
    own: bool = False

    @property
    def growable(self) -> bool:
        return bool(self.methods)


@usage("outgrow.places(model, example)")
@uncompiled()
def places(model: nn.Module, example: Example) -> list[Place]:
    """List the modules that a new block can follow, and the methods that are exact there: all places that `deepen` accepts.

    Children of containers, layers and activations are listed in any case, if necessary with the reason against each method. The
    model may be on the meta device: places depend on its code and its shapes, not on values.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.f = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        ...     def forward(self, x):
        ...         return x + self.f(x)
        >>> model = nn.Sequential(nn.Linear(3, 4), Block(), nn.Linear(4, 2))
        >>> [(place.name, place.methods) for place in places(model, torch.zeros(1, 3)) if place.own]
        [('1', ('r2r', 'r2r-paper', 'residual'))]
    """
    check_module(model := bare(model), values=False)
    blocks = [joined_path(path, key) for path, module in containers(model) for key in module._modules]
    survey = _surveyed(model, example, _Candidates(blocks_and_layers(model), blocks, _others(model)))
    neighbours = Neighbours(model)
    result = []
    for path in survey.run:
        reasons = dict.fromkeys(OWN_KIND_METHODS, "it is not in a container of blocks")
        reasons |= {method: survey.reason(path, method) for method in OWN_KIND_METHODS if path in survey.own}
        plain = legal(model, path, survey.found[path], survey.anatomy, survey.stuck or {}, neighbours)
        methods = dict.fromkeys(name for name, why in (*reasons.items(), *plain.items()) if not why)
        why = "; ".join(dict.fromkeys((reasons["r2r"], plain["r2r"])))
        result.append(Place(path, tuple(methods), "" if methods else why, own=not reasons["r2r"]))
    return [place for place in result if place.growable or place.name not in survey.others]


@dataclass(frozen=True)
class _Candidates:
    """Paths of the modules that may be places.

    listed: in any case. blocks: those of them that are children of a container. others: only if a block can follow them.
    """

    listed: Sequence[str]
    blocks: Sequence[str]
    others: Sequence[str]


def _others(model: nn.Module) -> list[str]:
    """Paths of modules that are neither blocks of a container, nor layers, nor activations."""
    listed = set(blocks_and_layers(model))
    return [path for path, _ in model.named_modules() if path and path not in listed]


@dataclass(eq=False)
class Survey:
    """Results of trials on a model: calls of its modules, and the methods by which its blocks can be made the identity."""

    found: dict[str, list[Call]]
    anatomy: Anatomy
    shadowed: bool  # on the meta device, without values
    stuck: dict[str, str] | None  # modules that can't be put into an nn.Sequential, and why; None: not known yet
    others: set[str]  # places that are neither blocks of a container, nor layers, nor activations
    own: dict[str, dict[str, Template | str]] = field(default_factory=dict)  # by block and method; a string is a reason
    idle: dict[str, str | None] = field(default_factory=dict)  # by container: why one more block does not run,
    # or changes outputs; "" if it is run and changes nothing, None if that is not known yet

    @property
    def run(self) -> list[str]:
        return [path for path, calls in self.found.items() if path and calls]

    def reason(self, path: str, method: str) -> str:
        """Why a method is not exact behind a block; empty if it is."""
        found = self.own[path][method]
        return found if isinstance(found, str) else self.idle[path.rpartition(".")[0]] or ""

    def first(self, container: str) -> str:
        """The first block of a container that a new block could follow."""
        return next(
            path
            for path, found in self.own.items()
            if path.rpartition(".")[0] == container and any(isinstance(one, Template) for one in found.values())
        )


def _surveyed(model: nn.Module, example: Example, candidates: _Candidates) -> Survey:
    """A survey on the meta device, with doubtful cases tried on the model itself; if it fails there, a survey of the model."""
    try:
        survey = _survey_on_meta(model, example, candidates)
    except Exception as error:
        if not has_values(model):
            known = isinstance(error, TraceError) and error.problems and not isinstance(error, ExampleError)
            raise error if known else without_values(error) from error
        survey = _survey(model, example, candidates, shadowed=False)
    if not has_values(model):
        survey.idle = {container: NO_VALUES if why is None else why for container, why in survey.idle.items()}
        survey.stuck = unwrappable(model, on_meta(example), survey.run) if survey.stuck is None else survey.stuck
        return survey
    if survey.stuck is None:
        survey.stuck = unwrappable(model, example, survey.run)
    doubtful = [container for container, why in survey.idle.items() if why is None]
    if doubtful:
        calls = calls_of(model, example, [""]) if survey.shadowed else survey.found
        before = outputs_in(calls[""][0].output)
        survey.idle |= {container: _idle(model, example, survey, container, before) for container in doubtful}
    return survey


def _survey_on_meta(model: nn.Module, example: Example, candidates: _Candidates) -> Survey:
    """A survey on the meta device; with the values of integers and masks, if the model does not run without them."""
    with without_garbage_collection():
        with suppress(Exception), tensors_on_meta(model):
            return _survey(model, on_meta(example), candidates, shadowed=True)
        with tensors_on_meta(model, known=True):
            return _survey(model, on_meta(example), candidates, shadowed=True)


def _survey(model: nn.Module, example: Example, candidates: _Candidates, shadowed: bool) -> Survey:
    found = calls_of(model, example, [*candidates.listed, *candidates.others, ""])
    anatomy, neighbours = dissect(model, example), Neighbours(model)
    others = {path for path in candidates.others if not legal(model, path, found[path], anatomy, {}, neighbours)["residual"]}
    found = {path: calls for path, calls in found.items() if path not in candidates.others or path in others}
    survey = Survey(found, anatomy, shadowed, None, others)
    with suppress(TraceError):
        survey.stuck = unwrappable(model, example, survey.run, CODE_ERRORS if shadowed else (Exception,))
    kinds, own = SiblingKinds(), set(candidates.blocks)
    for path in (path for path in survey.run if path in own):
        survey.own[path] = {}
        for method in OWN_KIND_METHODS:
            try:
                survey.own[path][method] = template_for(model, found, Deepen(path, method=method), 0, kinds)
            except NotZero as refused:
                survey.own[path][method] = str(refused)
        container = path.rpartition(".")[0]
        template = survey.own[path]["r2r"]
        if container not in survey.idle and any(isinstance(one, Template) for one in survey.own[path].values()):
            trace = survey.anatomy.reading.trace
            known = shadowed and isinstance(template, Template)
            survey.idle[container] = _without_values(model, example, path, template, trace) if known else None
    return survey


def _without_values(model: nn.Module, example: Example, path: str, template: Template | str, before: Trace) -> str | None:
    """The result of `_idle` as far as it follows on the meta device; None where it does not."""
    assert isinstance(template, Template)
    try:
        with _deepened(model, example, path, [template]) as plan:
            after = record(model, example)
    except Exception:  # the trial on the model itself decides
        return None
    if not any(within(op, block) for op in after.ops for block in plan.new_blocks):
        return NOT_RUN
    return "" if before.meta and runs_as_before(before, after, plan) else None


def _idle(model: nn.Module, example: Example, survey: Survey, container: str, before: Iterable[Tensor]) -> str:
    """Why a block added to a container is not run, or changes the outputs `before`, by trial; empty if neither."""
    path = survey.first(container)
    template = survey.own[path]["r2r"]
    known = [template] if isinstance(template, Template) and not survey.shadowed else None
    siblings = [name for name in survey.run if name.rpartition(".")[0] == container]
    try:
        with _deepened(model, example, path, known) as plan:
            called = calls_of(model, example, [*plan.new_blocks, *map(plan.renamed, siblings), ""])
        if not all(called.values()):
            return NOT_RUN
        after = outputs_in(called[""][0].output)
        if not all(_close(one, other) for one, other in zip(before, after, strict=True)):
            return "with one more block there the outputs change: the model's code does more for each block than run it"
    except NotZero as reason:
        return str(reason)
    except Exception as error:
        return f"the model does not run with one more block there: {str(error).splitlines()[0]}"
    return ""


@contextmanager
def _deepened(model: nn.Module, example: Example, path: str, known: Sequence[Template] | None) -> Iterator[Plan]:
    """A context in which the model has one more block behind another; yields the plan."""
    journal = Journal()
    with trial(journal) as tried:
        plans = own_kind(model, example, Deepen(path), 0, tried, known)
    try:
        for plan in plans:
            for insert in plan.inserts:
                put_in([model], example, insert, journal)
            for setting in plan.settings:
                apply_setting(model, setting, journal)
        yield joined(plans)
    finally:
        journal.undo()


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs agree up to rounding, with a wide tolerance: it only has to find code that computes differently."""
    gap, size = (one - other).abs().max() if one.numel() else 0.0, one.abs().max() if one.numel() else 1.0
    return one.shape == other.shape and bool(gap <= max(1e-4, 100 * torch.finfo(one.dtype).eps) * size)
