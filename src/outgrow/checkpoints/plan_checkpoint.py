"""Plan the growth of a checkpoint from its configuration and the headers of its files: no values are read.

The model is built on the meta device and grown there as `outgrow.grow` would grow it, its configuration included. The result is
the list of all new tensors, with names, shapes and the expressions that compute them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outgrow.checkpoints.build_on_meta import build_on_meta, class_of, config_of, without_weights
from outgrow.checkpoints.example_file import GivenExample, given_example
from outgrow.checkpoints.merged_tensors import Loading, as_loaded
from outgrow.checkpoints.new_values import IN_MEMORY, Edited, Stored, Value, origin, values_after
from outgrow.checkpoints.read_checkpoint import NAMES, Checkpoint
from outgrow.checkpoints.same_scalars import other_scalar
from outgrow.checkpoints.standard_examples import example_for, why_it_fails
from outgrow.checkpoints.tensor_names import Names, aliases_of, check_tied, match_names
from outgrow.configuration.explain_differences import NOT_UPDATED
from outgrow.configuration.rebuild_from_config import shapes_suffice
from outgrow.engine.dry_run_findings import shapes_of
from outgrow.engine.grow import dry_run
from outgrow.engine.growth_report import Growth
from outgrow.errors import CheckpointError, MethodError, Problem
from outgrow.growth_plan.plan import Plan
from outgrow.methods.learned import LearnedInit
from outgrow.model.example import Example, describe_example
from outgrow.model.known_values import on_meta
from outgrow.process.garbage_collection import release_memory
from outgrow.transforms.all_transforms import Transform, check_transforms
from outgrow.verify.compare_old_entries import NewOutputEntries

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NewTensor:
    """A tensor of the new checkpoint: its name and type in the file, and the expression for its values."""

    name: str
    dtype: torch.dtype
    shape: Shape
    value: Value
    alias: str  # its name in the model
    entries: tuple[tuple[str, Shape], ...]  # names and shapes in the file: several if it holds the tensor in parts

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class CheckpointPlan:
    """A planned growth of a checkpoint.

    model: the grown model on the meta device, whose configuration is the new one. growth: the report of the dry run, without
    measured errors. tensors: what will be written, in the order of the old files.
    """

    checkpoint: Checkpoint
    model: nn.Module
    growth: Growth
    names: Names
    tensors: tuple[NewTensor, ...]
    requests: tuple[Transform, ...]
    seed: int
    inputs: str  # the example of the dry run, in words
    dtype: torch.dtype | None = None  # of the new floating-point tensors, if it was requested

    @property
    def plan(self) -> Plan:
        return self.growth.plan

    @property
    def gains(self) -> tuple[NewOutputEntries, ...]:
        """Entries that the model's outputs gain."""
        return self.growth.gains

    @property
    def bytes(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def largest(self) -> int:
        """Bytes of the largest new tensor."""
        return max(tensor.size for tensor in self.tensors)


def plan_checkpoint(
    checkpoint: Checkpoint,
    requests: Sequence[Transform],
    seed: int = 0,
    example: GivenExample | None = None,
    dtype: torch.dtype | None = None,
) -> CheckpointPlan:
    """Plan a growth; refused with the reason if the result could not be a plain checkpoint of the same library.

    example: arguments of the forward method, or a file with them. dtype: of the new floating-point tensors.
    """
    check_transforms(requests)
    _check_fades(requests)
    _check_inits(requests)
    kind = class_of(checkpoint)
    model = build_on_meta(kind, config_of(checkpoint))
    checkpoint, loading = as_loaded(checkpoint, model)
    names = match_names(checkpoint, model)
    check_tied(checkpoint, names)
    given = given_example(example, kind)
    inputs = example_for(model) if given is None else given
    growth, values = grow_on_meta(kind, model, inputs, requests, seed)
    _check_experts(kind, config_of(checkpoint), model, inputs, dtype or checkpoint.dtype)
    if dtype is not None:
        model.config.dtype = dtype
    tensors = _new_tensors(checkpoint, model, names, loading, values, growth.plan, dtype)
    release_memory()  # the analysis of a large model takes more than the streaming of its tensors
    return CheckpointPlan(checkpoint, model, growth, names, tensors, tuple(requests), seed, describe_example(inputs), dtype)


def grow_on_meta(
    kind: Any, model: nn.Module, inputs: Example, requests: Sequence[Transform], seed: int = 0
) -> tuple[Growth, dict[str, Value]]:
    """Grow a model on the meta device, its configuration included; returns the report, and expressions for its tensors.

    Raises GrowthError if the growth is not exact, or if the result could not be a plain checkpoint of the model's class `kind`.
    """
    before = shapes_of(model)
    with shapes_suffice(), without_weights(kind):
        growth, ready = dry_run(model, on_meta(inputs), requests, seed)
    _check_result(model, kind, growth, inputs)
    values = values_after(before, ready.steps)
    _check_shapes(model, values, before)
    return growth, values


def _check_fades(requests: Sequence[Transform]) -> None:
    for request in requests:
        if getattr(request, "fade", None) is not None:
            raise MethodError(
                "fade= needs optimizer steps, and a gate that is no part of a plain checkpoint: leave it out (the methods for "
                f"checkpoints are exact without it), or {IN_MEMORY}"
            )


def _check_inits(requests: Sequence[Transform]) -> None:
    for request in requests:
        init = getattr(getattr(request, "method", None), "init", None)
        if isinstance(init, LearnedInit):
            raise MethodError(f"init={init.name} runs the model on batches, and here its weights stay on the disk: {IN_MEMORY}")


def _check_result(model: nn.Module, kind: Any, growth: Growth, inputs: Example) -> None:
    """Refuse a growth that changes the function, or that no configuration describes."""
    if not growth.preserving:
        inexact = [Problem(change.volume, f"{change.method} changes the outputs") for change in growth.plan.changes]
        raise MethodError("a checkpoint is only grown by exact methods", inexact[:5])
    left = [note for note in growth.notes if note.startswith(NOT_UPDATED)]
    if left:
        reason = left[0].removeprefix(NOT_UPDATED).rpartition("); use outgrow.save")[0].removeprefix(" (")
        raise CheckpointError(
            f"no configuration of {kind.__name__} describes the grown model, so it could not be loaded: {reason}"
        )
    rebuilt = build_on_meta(kind, model.config)
    computed = {name for name, _ in model.named_buffers()} - model.state_dict().keys()  # the library makes them
    there, here = ({k: v for k, v in shapes_of(one).items() if k not in computed} for one in (rebuilt, model))
    if here != there:
        name = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        raise CheckpointError(
            f"a model built from the new configuration would have {name} as {there.get(name)} instead of {here.get(name)}"
        )
    if difference := other_scalar(model, rebuilt, inputs):
        raise CheckpointError(
            f"no configuration of {kind.__name__} describes the grown model, so it could not be loaded: built from the "
            f"new one, {difference}"
        )


def _check_experts(kind: Any, old: Any, model: nn.Module, inputs: Example, dtype: torch.dtype) -> None:
    """Refuse sizes of experts for which the grouped product is not defined in the dtype of the file; the plan is in float32."""
    if dtype not in (torch.float16, torch.bfloat16) or all(len(shape) < 3 for shape in shapes_of(model).values()):
        return
    reason = why_it_fails(build_on_meta(kind, model.config, dtype), inputs)
    if reason is not None and why_it_fails(build_on_meta(kind, old, dtype), inputs) is None:
        raise CheckpointError(
            f"the grown model would not run in {dtype} ({reason}): choose a multiple of 8 as the size of experts"
        )


def _check_shapes(model: nn.Module, values: Mapping[str, Value], before: Mapping[str, Shape]) -> None:
    """The expressions must describe exactly the tensors of the grown model."""
    here = shapes_of(model)
    there = {name: _shape(value, before) for name, value in values.items()}
    if here != there:
        name = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        raise CheckpointError(
            f"{name}: it shares memory with a tensor outside of its block, which can't be copied on the disk: {IN_MEMORY}"
        )


def _shape(value: Value, before: Mapping[str, Shape]) -> Shape:
    if isinstance(value, Stored):
        return before[value.name]
    shape = _shape(value.source, before)
    return value.edits.shape_from(shape) if isinstance(value, Edited) else shape


def _check_not_stored(
    derived: Mapping[str, Sequence[str]], stored: set[str], values: Mapping[str, Value], aliases: Mapping[str, Sequence[str]]
) -> None:
    """Refuse a change of tensors that are not in the files: the library makes their values when it loads the model."""
    for old in derived.keys() - stored:
        for name in derived[old]:
            if name in aliases and not isinstance(values[name], Stored):
                raise CheckpointError(
                    f"{name} would grow, and it is not stored: the library makes its values when it loads the model, and would "
                    f"make others than those of the growth; {IN_MEMORY}, and save it by outgrow.save"
                )


def _new_tensors(
    checkpoint: Checkpoint,
    model: nn.Module,
    names: Names,
    loading: Loading,
    values: Mapping[str, Value],
    plan: Plan,
    dtype: torch.dtype | None,
) -> tuple[NewTensor, ...]:
    """What to write: for each stored tensor, the new tensors that are derived from it."""
    derived: dict[str, list[str]] = {}
    for name, value in values.items():
        derived.setdefault(origin(value), []).append(name)
    aliases, shapes = aliases_of(model), shapes_of(model)
    _check_not_stored(derived, {named.name for named in names.used}, values, aliases)
    found = []
    for named in names.used:
        for name in derived[named.name]:
            alias = name if named.alias == named.name else plan.renamed(named.alias)
            if alias not in aliases.get(name, ()):
                raise CheckpointError(f"{named.stored}: the grown model has no name for it, since it is tied to {name}")
            kind = checkpoint.tensors[named.stored].dtype
            kind = dtype if dtype is not None and kind.is_floating_point else kind
            stored = names.stored_as(alias, named)
            entries = loading.entries(stored, shapes[name], named.stored)
            found.append(NewTensor(stored, kind, shapes[name], values[name], alias, entries))
    unknown = [one.name for one in found if one.dtype not in NAMES]
    if unknown:
        raise CheckpointError(f"{unknown[0]} can't be written as {dtype}; known: {', '.join(map(str, NAMES))}")
    return tuple(found)
